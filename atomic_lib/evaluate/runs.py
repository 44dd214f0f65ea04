# SPDX-License-Identifier: Apache-2.0
"""Evaluates every model of an export run on the validation split; writes evaluation.json."""

import math
from pathlib import Path
from typing import Any

from atomic_lib.config import EvaluateConfig, TrainConfig
from atomic_lib.config.coerce import build
from atomic_lib.data import TokenDataset, open_dataset
from atomic_lib.evaluate.validation import evaluate_parameters, position_rows
from atomic_lib.evidence import RunFolder, effective_rows, read_rows
from atomic_lib.evidence.finished_run import FinishedRun
from atomic_lib.evidence.metrics_log import Row
from atomic_lib.export.layout import EXPORT, ExportedModel, read_export

# The trainer and this module run the same step on the same parameters; what may differ is the order
# of float32 sums (another batch size or number of devices) and, with bfloat16 activations, the few
# roundings that such an order decides: 2^-8 an activation, averaged over thousands of targets.
SAME_RESULT_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}  # relative, of the mean loss


def evaluate(run: RunFolder, config: EvaluateConfig, *, root: Path) -> list[dict[str, Any]]:
    """Evaluates the exports in run.path's neighbour `config.source`; a table row for each.

    evaluation.json holds, per model, the sums, bits per byte, the mean loss by position, the data's
    hash, and the trainer's last evaluation beside it. root: the repository, for `open_dataset`.
    Raises FileNotFoundError or ValueError if the source is missing, not
    verified or holds no export, ValueError if the data are not those that the run was trained with,
    and RuntimeError if a model does not repeat its trainer's last evaluation.
    """
    source = FinishedRun.open(run.path.parent / config.source)
    folders = sorted(path.parent for path in source.path.glob(f"*/{EXPORT}"))
    if not folders:
        raise ValueError(
            f"source: run {config.source!r} holds no export; name a run of the export notebook."
        )
    reports = []
    for folder in folders:
        report = _evaluate_export(run, read_export(folder), config, root)
        reports.append(report)
    run.write_json(
        "evaluation.json",
        {"schema": "atomic-evaluation/1", "source": config.source, "models": reports},
    )
    run.record_inputs(source.path / "SUCCESS.json")
    return [_table_row(report) for report in reports]


def _evaluate_export(
    run: RunFolder, exported: ExportedModel, config: EvaluateConfig, root: Path
) -> dict[str, Any]:
    folder, origin = exported.folder, exported.facts["source"]
    training: TrainConfig = build(TrainConfig, origin["training"])
    dataset = open_dataset(training.corpus, vocab_size=exported.config.vocab_size, root=root)
    _require_same_data(dataset, exported)
    trained = _trainer_evaluation(folder, origin["step"])
    batch_size, batches = _batches(config, training, trained)
    found = evaluate_parameters(
        exported.tensors, training, dataset, batch_size=batch_size, batches=batches,
        progress=lambda done, total: run.progress("evaluate", done, total, origin["run_id"]),
    )  # fmt: skip
    _require_same_result(found, trained, training.compute_dtype, origin["run_id"])
    position_nats = found.pop("position_nats")
    return {
        "run_id": origin["run_id"],
        "step": origin["step"],
        "weights_sha256": exported.facts["files"]["model.safetensors"]["sha256"],
        "validation": dataset.manifest["validation"],
        "tokenizer": dataset.manifest["tokenizer"],
        "compute_dtype": training.compute_dtype,
        "sequence_length": training.sequence_length,
        "batch_size": batch_size,
        **found,
        "trainer": None if trained is None else {k: trained[k] for k in ("ce", "target_tokens")},
        "positions": position_rows(position_nats),
        "position_nats": position_nats.tolist(),
    }


def _trainer_evaluation(folder: Path, step: int) -> Row | None:
    """The trainer's evaluation of the exported step; None if it did not evaluate there."""
    rows = effective_rows(read_rows(folder / "metrics.jsonl"))
    found = [row for row in rows if row["kind"] == "eval" and row["step"] == step]
    return found[-1] if found else None


def _batches(
    config: EvaluateConfig, training: TrainConfig, trained: Row | None
) -> tuple[int, int | None]:
    """(batch size, batches): as configured, else the very windows that the trainer evaluated."""
    if config.eval_batches is not None or trained is None:
        return config.batch_size, config.eval_batches
    windows = trained["batches"] * training.eval_rows
    size = max(n for n in range(1, config.batch_size + 1) if windows % n == 0)
    return size, windows // size


def _require_same_data(dataset: TokenDataset, exported: ExportedModel) -> None:
    recorded = exported.facts["source"]["data"]["validation"]
    found = [facts["hash"] for facts in dataset.manifest["validation"]]
    if found != recorded:
        raise ValueError(
            f"the validation split of {dataset.folder} has hashes {found}, but run "
            f"{exported.facts['source']['run_id']!r} was trained with {recorded}. Restore that "
            "corpus (the built-in one depends on the Python version)."
        )


def _require_same_result(
    found: dict[str, Any], trained: Row | None, dtype: str, run_id: str
) -> None:
    if trained is None or trained["target_tokens"] != found["target_tokens"]:
        return
    tolerance = SAME_RESULT_TOLERANCE[dtype]
    if not math.isclose(found["ce"], trained["ce"], rel_tol=tolerance):
        raise RuntimeError(
            f"run {run_id!r}: the exported weights give a cross-entropy of {found['ce']:.7f}, the "
            f"trainer's last evaluation {trained['ce']:.7f}; they may differ by {tolerance} "
            "(relative). The export is not what was trained, or this machine computes otherwise."
        )


def _table_row(report: dict[str, Any]) -> dict[str, Any]:
    trained = report["trainer"]
    same = trained is not None and trained["target_tokens"] == report["target_tokens"]
    return {
        "model": report["run_id"],
        "step": report["step"],
        "targets": report["target_tokens"],
        "ce (nats)": report["ce"],
        "bpb_est": report["bpb_est"],
        "bpb_exact": report["bpb_exact"],
        "bytes a token": report["bytes"] / report["target_tokens"] if report["bytes"] else None,
        "ce − trainer's": report["ce"] - trained["ce"] if same else None,
    }
