# SPDX-License-Identifier: Apache-2.0
"""The folder of an exported model: written once, read back bit for bit, checked on every load.

    model.safetensors   every parameter once, float32, named by its path in the module tree joined
                        by "/"; dense kernels are [in, out], embedding tables [vocabulary, hidden]
    config.json         the model's configuration, and the layout in words
    export.json         per tensor: name, shape, dtype, sha256, finite, absmax; sha256 of the two
                        files above; the run and step that the parameters are from

A tied embedding is stored once, as embedding/table; config.json says that it is also the output.
Reading needs numpy and safetensors, no jax.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from atomic_lib.evidence.files import sync_folder, write_json
from atomic_lib.model.config import ModelConfig

WEIGHTS, CONFIG, EXPORT = "model.safetensors", "config.json", "export.json"
CONFIG_SCHEMA = "atomic-model/1"
EXPORT_SCHEMA = "atomic-export/1"
DTYPE = np.dtype("<f4")

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A checked export: the configuration, float32 parameters by name, and its export.json."""

    folder: Path
    config: ModelConfig
    tensors: Tensors
    facts: dict[str, Any]


def write_export(
    folder: Path,
    parameters: Mapping[str, ArrayLike],
    config: ModelConfig,
    *,
    source: Mapping[str, Any],
) -> ExportedModel:
    """Writes an export into `folder`, reads it back and compares every bit.

    parameters: name -> float32 array, exactly those of `config.parameter_shapes`. source: where
    they are from (run_id, step, ...), kept in export.json. Raises ValueError before anything is
    written if a name, shape, dtype or non-finite value is wrong, and naming the tensor if what
    comes back from the disk has other bits.
    """
    tensors = _checked_tensors(parameters, config)
    folder.mkdir(parents=True, exist_ok=True)
    # export.json goes first and comes last: without it the folder is no export.
    (folder / EXPORT).unlink(missing_ok=True)
    write_json(folder / CONFIG, _config_json(config))
    _write_tensors(folder / WEIGHTS, tensors, source)
    write_json(
        folder / EXPORT,
        {
            "schema": EXPORT_SCHEMA,
            "source": dict(source),
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "files": {name: _file_facts(folder / name) for name in (WEIGHTS, CONFIG)},
            "tensors": [_tensor_facts(name, tensor) for name, tensor in tensors.items()],
        },
    )
    # The hashes are of the arrays in memory, so reading compares the file with them bit for bit.
    return read_export(folder)


def read_export(folder: str | os.PathLike[str]) -> ExportedModel:
    """Reads an export after checking it against its export.json.

    Raises FileNotFoundError if a file is missing and ValueError, with the reason, if the folder is
    no export of this layout, a hash differs, or tensors do not fit the configuration.
    """
    folder = Path(folder)
    facts = _read_json(folder / EXPORT, EXPORT_SCHEMA)
    values = _read_json(folder / CONFIG, CONFIG_SCHEMA)
    config = ModelConfig.from_dict(values["model"])
    tensors = _read_tensors(folder / WEIGHTS)
    _require_shapes(folder / WEIGHTS, {name: t.shape for name, t in tensors.items()}, config)
    recorded = {entry["name"]: entry for entry in facts["tensors"]}
    for name, tensor in tensors.items():
        found = _tensor_facts(name, tensor)
        if found != recorded.get(name):
            raise ValueError(
                f"{folder / WEIGHTS}: tensor {name} is {found}, but {EXPORT} records "
                f"{recorded.get(name)}. The file was changed; export or download it again."
            )
    for name in (WEIGHTS, CONFIG):
        found = _file_facts(folder / name)
        if found != facts["files"][name]:
            raise ValueError(
                f"{folder / name}: it has {found}, but {EXPORT} records {facts['files'][name]}. "
                "The file was changed; export or download it again."
            )
    return ExportedModel(folder=folder, config=config, tensors=tensors, facts=facts)


def _checked_tensors(parameters: Mapping[str, ArrayLike], config: ModelConfig) -> Tensors:
    tensors: Tensors = {}
    for name in sorted(parameters):
        tensor = np.asarray(parameters[name])
        if tensor.dtype != DTYPE:
            raise ValueError(
                f"parameters: {name} is {tensor.dtype}; exports are float32, the dtype that is "
                "trained. Export the trained parameters, not a cast of them."
            )
        # The writer stores the bytes as they lie in memory.
        tensors[name] = np.ascontiguousarray(tensor)
    _require_shapes("parameters", {name: t.shape for name, t in tensors.items()}, config)
    wrong = {n: int(np.count_nonzero(~np.isfinite(t))) for n, t in tensors.items()}
    wrong = {name: count for name, count in wrong.items() if count}
    if wrong:
        raise ValueError(
            f"parameters: values that are not finite, by tensor: {wrong}. Export an earlier "
            "checkpoint."
        )
    return tensors


def _require_shapes(
    where: str | Path, found: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    expected = config.parameter_shapes
    missing, unknown = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
    if missing or unknown:
        raise ValueError(
            f"{where}: the names are not those of the configuration; missing {missing[:5]} "
            f"({len(missing)}), unknown {unknown[:5]} ({len(unknown)})."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise ValueError(
                f"{where}: {name} has shape {tuple(found[name])}; the configuration makes it "
                f"{tuple(shape)}."
            )


def _config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "schema": CONFIG_SCHEMA,
        "model": config.to_dict(),
        "parameters": config.parameter_count,
        "layout": {
            "names": "path in the module tree, joined by '/'",
            "dense_kernels": "[in, out]",
            "embedding_tables": "[vocabulary, hidden]",
            "dtype": "float32",
            "output_embedding": "embedding/table" if config.tied_embedding else "unembedding/table",
        },
    }


def _write_tensors(path: Path, tensors: Tensors, source: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    labels = {key: str(source[key]) for key in ("run_id", "step") if key in source}
    save_file(tensors, temporary, metadata={"layout": "flax", **labels})
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.chmod(0o644)  # the writer makes it unreadable for others, unlike every file beside it
    temporary.replace(path)
    sync_folder(path.parent)


def _read_tensors(path: Path) -> Tensors:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; export or download it again.")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file ({error}); download it again.") from error


def _read_json(path: Path, schema: str) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, so {path.parent} is no export of this suite; it needs "
            f"{WEIGHTS}, {CONFIG} and {EXPORT}."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); export or download it again.") from error
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise ValueError(
            f"{path} has schema {found!r}, and {schema!r} is what can be read: {path.parent} is "
            "another project's model, or a newer version's."
        )
    return value


def _tensor_facts(name: str, tensor: NDArray[Any]) -> dict[str, Any]:
    absmax = float(np.max(np.abs(tensor))) if tensor.size else 0.0
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "sha256": hashlib.sha256(np.ascontiguousarray(tensor).data).hexdigest(),
        "finite": math.isfinite(absmax),  # NaN and infinity both reach the maximum
        "absmax": absmax,
    }


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
