# SPDX-License-Identifier: Apache-2.0
"""What all processes of a run do next: the first one's clock and record decide, and any signal."""

import signal as signals
from dataclasses import dataclass

import numpy as np

from atomic_lib.hosts.processes import gather
from atomic_lib.train.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One look at the run before a step; the same in every process."""

    elapsed_seconds: float
    evaluated: bool  # whether this step has its evaluation
    out_of_time: bool
    save: bool
    signal: str | None  # "SIGTERM" or "SIGINT" if a process was asked to stop

    def shared(self) -> "Decision":
        """The first process's decision, with a signal that any process has got."""
        number = signals.Signals[self.signal].value if self.signal else 0
        rows = gather([self.elapsed_seconds, self.evaluated, self.out_of_time, self.save, number])
        elapsed, evaluated, out_of_time, save, _ = rows[0]
        number = int(rows[:, 4].max())
        return Decision(
            elapsed_seconds=float(elapsed),
            evaluated=bool(evaluated),
            out_of_time=bool(out_of_time),
            save=bool(save),
            signal=signals.Signals(number).name if number else None,
        )


def require_same_start(checkpoint: Checkpoint | None) -> None:
    """Raises RuntimeError unless every process begins at the same checkpoint."""
    steps = gather([checkpoint.step if checkpoint else -1.0])[:, 0]
    if not np.all(steps == steps[0]):
        found = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in steps)
        raise RuntimeError(
            f"the processes of this run see different checkpoints ({found}, in their order): the "
            "outputs folder must be on a file system that all of them share"
        )
