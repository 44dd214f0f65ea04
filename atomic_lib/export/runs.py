# SPDX-License-Identifier: Apache-2.0
"""From finished training runs to exports: the parameters of each run's last checkpoint."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from atomic_lib.config import ExportConfig, TrainConfig
from atomic_lib.config.coerce import build
from atomic_lib.evidence import RunFolder
from atomic_lib.evidence.finished_run import FinishedRun
from atomic_lib.export.layout import WEIGHTS, ExportedModel, read_export, write_export
from atomic_lib.model import (
    Execution,
    LanguageModel,
    ModelConfig,
    abstract_parameters,
    bind_parameters,
    model_graph,
)

# Files of the training run that travel with its weights, where the run has them.
TRAVELLING_FILES = (
    "metrics.jsonl",
    "training_args.json",
    "provenance.json",
    "runtime-preflight.json",
    "SUCCESS.json",
)


def export(run: RunFolder, config: ExportConfig) -> list[dict[str, Any]]:
    """Exports each run of `config.sources` into run.path/<source>/; a table row for each.

    The folder has the layout of `layout.py`; the source's own record (TRAVELLING_FILES) lies beside
    it. Raises FileNotFoundError or ValueError if a source is
    missing, not verified, no training run, or has no checkpoint here, and as `write_export` does.
    """
    rows = []
    # Every source is opened before the first is written: a wrong name costs no time.
    sources = [FinishedRun.open(run.path.parent / name) for name in config.sources]
    checkpoints = [_last_checkpoint(source) for source in sources]
    for done, (source, checkpoint) in enumerate(zip(sources, checkpoints, strict=True)):
        run.progress("export", done, len(sources), source.run_id)
        exported = _export_run(run.path / source.run_id, source, checkpoint)
        rows.append(_table_row(exported))
    run.record_inputs(*(source.path / "SUCCESS.json" for source in sources))
    run.progress("export", len(sources), len(sources), "done")
    return rows


def load_export(
    folder: Path, *, execution: Execution | None = None
) -> tuple[ModelConfig, LanguageModel]:
    """Reads an export, checks its hashes, and makes the model (float32 parameters).

    execution None computes in float32. Raises as `read_export` does.
    """
    exported = read_export(folder)
    execution = Execution(compute_dtype="float32") if execution is None else execution
    parameters = {name: jax.numpy.asarray(tensor) for name, tensor in exported.tensors.items()}
    return exported.config, bind_parameters(model_graph(exported.config, execution), parameters)


def restore_parameters(checkpoint: Path, config: ModelConfig) -> dict[str, jax.Array]:
    """Reads the parameters alone from a checkpoint's state, onto one device, by name.

    Raises ValueError if the checkpoint holds other names or shapes than `config` has.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        "params": {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            for name, leaf in abstract_parameters(config).items()
        }
    }
    arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,  # the optimiser's moments are twice as large and not exported
    )
    state = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(checkpoint / "state", arguments)
    parameters: dict[str, jax.Array] = state["params"]
    for name, leaf in like["params"].items():
        if parameters[name].shape != leaf.shape:
            raise ValueError(
                f"checkpoint {checkpoint} holds {name} with shape {parameters[name].shape}; the "
                f"configuration makes it {leaf.shape}."
            )
    return parameters


def _last_checkpoint(source: FinishedRun) -> Path:
    """The folder of the checkpoint that the run ended with (its hashes are checked already)."""
    recorded: Mapping[str, Any] | None = source.success["checkpoint"]
    if recorded is None:
        raise ValueError(
            f"run {source.run_id!r} wrote no checkpoint, so there is nothing to export; name a "
            "finished training run."
        )
    path = source.path / recorded["path"]
    if not path.is_dir():
        raise FileNotFoundError(
            f"run {source.run_id!r} is here without its checkpoint {recorded['path']}; the zip of "
            "a run leaves checkpoints out. Export where it was trained."
        )
    return path


def _export_run(folder: Path, source: FinishedRun, checkpoint: Path) -> ExportedModel:
    config = build(TrainConfig, source.parameters)
    exported = write_export(
        folder,
        restore_parameters(checkpoint, config.model_config),
        config.model_config,
        source={
            "run_id": source.run_id,
            "step": source.success["final_step"],
            "tokens": source.success["final_tokens"],
            "checkpoint": dict(source.success["checkpoint"]),
            "training": dict(source.parameters),
            "data": _data_hashes(checkpoint),
            "git_commit": source.manifest["git"]["commit"],
            "source_sha256": source.manifest["source"]["sha256"],
            "success_digest": source.success["digest"],
        },
    )
    for name in TRAVELLING_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
    return exported


def _data_hashes(checkpoint: Path) -> dict[str, list[str]]:
    """Hashes of the token files that the run trained and validated on, by split."""
    commit = json.loads((checkpoint / "commit.json").read_text(encoding="utf-8"))
    return commit["config"]["data"]


def _table_row(exported: ExportedModel) -> dict[str, Any]:
    tensors = exported.facts["tensors"]
    largest = max(tensors, key=lambda entry: entry["absmax"])
    return {
        "run": exported.facts["source"]["run_id"],
        "step": exported.facts["source"]["step"],
        "parameters": exported.facts["parameters"],
        "tensors": len(tensors),
        "MB": exported.facts["files"][WEIGHTS]["bytes"] / 1e6,
        "largest value": largest["absmax"],
        "in": largest["name"],
        "read back": "equal bit for bit",
    }
