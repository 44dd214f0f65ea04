# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and digests of large inputs."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomic_lib.evidence.verify import json_text, sha256_file

# Above this an input is sampled: a full sha256 of the 18 GB OpenWebText file costs 10 s to 60 s of
# a session, its 64 samples cost 64 MiB of reading.
FULL_HASH_BYTES = 2 << 30
SAMPLE_COUNT = 64
SAMPLE_BYTES = 1 << 20
SAMPLED_METHOD = "sha256 of the size (decimal) and 64 evenly spaced pieces of 1 MiB, first and last"


def atomic_write(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` holds either its old content or all of the new one.

    The temporary file lies beside it as .NAME.tmp; file and folder are fsynced.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut, where the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a mapping as JSON, atomically, after `plain`."""
    atomic_write(path, json_text(plain(value)).encode())


def plain(value: Any) -> Any:
    """Turns a value into what JSON can hold.

    Arrays and scalars of numpy or jax become lists and numbers, paths strings, dataclasses and
    mappings objects. A number that is not finite becomes null, and the object around it gets
    "nonfinite": true. Raises TypeError for anything else.
    """
    result, _ = _plain(value)
    return result


def _plain(value: Any) -> tuple[Any, bool]:
    """The JSON value, and whether it holds a non-finite number that no object has noted yet."""
    if value is None or isinstance(value, (bool, int, str)):
        return value, False
    if isinstance(value, float):
        return (float(value), False) if math.isfinite(value) else (None, True)
    if isinstance(value, os.PathLike):
        return os.fspath(value), False
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        if any(lost for _, lost in items.values()):
            items["nonfinite"] = (True, False)
        return {key: item for key, (item, _) in items.items()}, False
    if isinstance(value, (list, tuple, set, frozenset)):
        pairs = [_plain(item) for item in value]
        return [item for item, _ in pairs], any(lost for _, lost in pairs)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise TypeError(f"cannot be written as JSON: {value!r} of type {type(value).__name__}")


def input_digest(path: Path) -> tuple[str, str]:
    """Returns (method, hexadecimal digest) of an input file; from 2 GiB on it is sampled."""
    size = Path(path).stat().st_size
    if size < FULL_HASH_BYTES:
        return "sha256", sha256_file(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for index in range(SAMPLE_COUNT):
            file.seek((size - SAMPLE_BYTES) * index // (SAMPLE_COUNT - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return SAMPLED_METHOD, digest.hexdigest()
