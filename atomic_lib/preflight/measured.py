# SPDX-License-Identifier: Apache-2.0
"""What a preflight predicted for a training run, beside what the run measured on its devices."""

import json
import statistics
from pathlib import Path
from typing import Any

import jax

from atomic_lib.aot.identity import program_identity
from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder, effective_rows
from atomic_lib.evidence.verify import sha256_file
from atomic_lib.preflight.ahead import AHEAD_OF_TIME


def find_prediction(outputs: Path, config: TrainConfig) -> Path | None:
    """The newest ahead-of-time.json below `outputs` of the program that `config` runs here.

    Here means this process's devices, kind and number. None if there is no such report.
    """
    devices = jax.devices()
    wanted = (program_identity(config), devices[0].device_kind, len(devices))
    found = []
    for path in outputs.glob(f"*/{AHEAD_OF_TIME}"):
        report = json.loads(path.read_text(encoding="utf-8"))
        if (report["program"], report["device_kind"], report["devices"]) == wanted:
            found.append(path)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def predicted_and_measured(run: RunFolder, config: TrainConfig) -> dict[str, Any]:
    """The argument `prediction` of `RunFolder.succeed`: both figures, or {} without a report.

    step_ms is the median of this run's timed steps beside the two ends of the prediction; hbm_bytes
    the most that the first device has held beside the compiler's figure (None where the platform
    does not tell). The report is named with its hash.
    """
    path = find_prediction(run.path.parent, config)
    if path is None:
        return {}
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = effective_rows(run.metrics.rows())
    times = [row["step_ms"] for row in rows if row["kind"] == "train" and row["step_ms"]]
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "prediction": {
            "report": path.relative_to(run.path.parent).as_posix(),
            "report_sha256": sha256_file(path),
            "basis": report["basis"],
            "step_ms": {
                "predicted": report["predicted_step_ms"],
                "predicted_at_bandwidth": report["predicted_step_ms_at_bandwidth"],
                "measured": statistics.median(times) if times else None,
            },
            "hbm_bytes": {
                "predicted": report["predicted_hbm_bytes"],
                "measured": memory.get("peak_bytes_in_use"),
            },
        }
    }


def prediction_rows(prediction: dict[str, Any]) -> list[dict[str, Any]]:
    """Table rows of `predicted_and_measured`'s result; none without a report."""
    if not prediction:
        return []
    facts = prediction["prediction"]
    return [
        {"quantity": name.replace("_", " "), **{key: facts[name][key] for key in _COLUMNS}}
        for name in ("step_ms", "hbm_bytes")
    ]


_COLUMNS = ("predicted", "measured")
