# SPDX-License-Identifier: Apache-2.0
"""Where a running notebook is: its saved cells and its heartbeat.json, read from outside."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.evidence.run_folder import HEARTBEAT
from atomic_lib.evidence.verify import NOTEBOOK


@dataclass(frozen=True, kw_only=True)
class Position:
    """One look at a run. `done` of `total` counts within the stage; total 0 means unknown."""

    elapsed_seconds: float = 0.0
    cells_done: int = 0
    cells: int = 0
    stage: str = "starting"
    done: float = 0.0
    total: float = 0.0
    text: str = ""
    remaining_seconds: float | None = None  # of the stage

    @property
    def fraction(self) -> float:
        """How much of the notebook is done: whole cells and the part of the one that runs."""
        if self.cells == 0:
            return 0.0
        inside = min(self.done / self.total, 1.0) if self.total > 0 else 0.0
        return min((self.cells_done + inside) / self.cells, 1.0)


class Watcher:
    """Follows one run folder. Files from before `Watcher` was made are not believed."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time):
        self._folder = folder
        self._clock = clock
        self._started_at = clock()
        self._notebook_changed_at = 0
        self._cells = (0, 0)
        self._stage_began: tuple[str, float, float] = ("", 0.0, 0.0)  # stage, when, done then

    def look(self) -> Position:
        """Reads both files again if they changed. What is half written is left for next time."""
        self._read_cells()
        beat = self._read_heartbeat()
        stage, done, total = (
            beat.get("stage", "starting"),
            beat.get("done", 0),
            beat.get("total", 0),
        )
        return Position(
            elapsed_seconds=self._clock() - self._started_at,
            cells_done=self._cells[0],
            cells=self._cells[1],
            stage=stage,
            done=done,
            total=total,
            text=beat.get("text", ""),
            remaining_seconds=self._remaining(stage, done, total, beat.get("time", 0.0)),
        )

    def _read_heartbeat(self) -> dict[str, Any]:
        try:
            beat = json.loads((self._folder / HEARTBEAT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return beat if beat.get("time", 0.0) >= self._started_at else {}

    def _read_cells(self) -> None:
        path = self._folder / NOTEBOOK
        try:
            changed_at = path.stat().st_mtime_ns
            if changed_at == self._notebook_changed_at:
                return
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError, KeyError):
            return
        self._notebook_changed_at = changed_at
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        self._cells = (sum(cell["execution_count"] is not None for cell in code), len(code))

    def _remaining(self, stage: str, done: float, total: float, at: float) -> float | None:
        began_stage, began_at, began_done = self._stage_began
        if stage != began_stage or done < began_done:
            self._stage_began = (stage, at, done)
            return None
        if done >= total or done <= began_done or at <= began_at:
            return None
        return (total - done) * (at - began_at) / (done - began_done)
