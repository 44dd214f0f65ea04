# SPDX-License-Identifier: Apache-2.0
"""Reads finished training runs and compares them; writes comparison.json."""

from typing import Any

from atomic_lib.compare.statistics import Comparison, Curve, compare_curves
from atomic_lib.config import CompareConfig
from atomic_lib.evidence import RunFolder
from atomic_lib.evidence.finished_run import FinishedRun

# Runs that differ in one of these were not trained or evaluated on the same text.
SHARED_PARAMETERS = ("corpus", "sequence_length")


def compare(run: RunFolder, config: CompareConfig) -> Comparison:
    """Compares the baseline and hybrid runs beside `run` and writes comparison.json into it.

    Raises FileNotFoundError or ValueError if a run is missing or not verified (see
    `FinishedRun.open`), if runs differ in corpus or sequence length, and as `compare_curves` does.
    """
    outputs = run.path.parent
    sources = {
        name: [FinishedRun.open(outputs / run_id) for run_id in run_ids]
        for name, run_ids in (("baseline", config.baseline), ("hybrid", config.hybrid))
    }
    every = [source for group in sources.values() for source in group]
    for parameter in SHARED_PARAMETERS:
        values: dict[str, Any] = {s.run_id: s.parameters[parameter] for s in every}
        if len(set(values.values())) > 1:
            raise ValueError(f"runs cannot be compared: {parameter} differs ({values}).")
    curves = {
        name: [
            Curve.from_rows(
                source.rows(),
                run_id=source.run_id,
                architecture=name,
                seeds=source.manifest["seeds"],
            )
            for source in group
        ]
        for name, group in sources.items()
    }
    comparison = compare_curves(curves, targets=config.targets)
    run.record_inputs(*(source.path / "SUCCESS.json" for source in every))
    run.write_json("comparison.json", comparison.to_json())
    return comparison
