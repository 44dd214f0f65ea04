# SPDX-License-Identifier: Apache-2.0
"""A run folder that is finished and verified, opened for reading by a later notebook."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.evidence.metrics_log import Row, effective_rows, read_rows
from atomic_lib.evidence.verify import METRICS, SUCCESS, verify


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a finished run was given (`manifest`) and how it ended (`success`)."""

    path: Path
    manifest: Mapping[str, Any]
    success: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "FinishedRun":
        """Opens outputs/<run_id>/ after `verify`.

        Raises FileNotFoundError if there is no such folder (naming the runs beside it), and
        ValueError with the first problems if it is not verified.
        """
        path = Path(path)
        if not path.is_dir():
            beside = sorted(p.parent.name for p in path.parent.glob("*/manifest.json"))
            raise FileNotFoundError(
                f"run {path.name!r} is not in {path.parent}; the runs there are "
                f"{', '.join(beside) or 'none'}. Run its notebook first."
            )
        problems = verify(path)
        if problems:
            raise ValueError(
                f"run {path.name!r} is not verified, so nothing is made from it: "
                f"{'; '.join(problems[:3])}. Run its notebook again."
            )
        return cls(
            path=path,
            manifest=json.loads((path / "manifest.json").read_text(encoding="utf-8")),
            success=json.loads((path / SUCCESS).read_text(encoding="utf-8")),
        )

    @property
    def run_id(self) -> str:
        """Name of the folder: <notebook>-<run>."""
        return self.manifest["run_id"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The resolved parameters of the notebook."""
        return self.manifest["parameters"]

    def rows(self) -> list[Row]:
        """The metric rows that no resume superseded; empty for a run that logs none."""
        return effective_rows(read_rows(self.path / METRICS)) if self._has_metrics else []

    def last_evaluation(self) -> Row:
        """The last evaluation row. Raises ValueError if the run logged none."""
        evaluations = [row for row in self.rows() if row["kind"] == "eval"]
        if not evaluations:
            raise ValueError(f"run {self.run_id!r} logged no evaluation in {METRICS}.")
        return evaluations[-1]

    @property
    def _has_metrics(self) -> bool:
        return (self.path / METRICS).is_file()
