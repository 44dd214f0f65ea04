# SPDX-License-Identifier: Apache-2.0
"""When a run must stop so that everything after training still fits into its time budget.

The clock is the wall clock from the first notebook cell. Training stops before the step that would
end after

    budget - 1.5 (last evaluation + last checkpoint + finishing)

where the times of evaluation and checkpoint are those that this run has measured. Until a
checkpoint has been written its time is its size over an assumed disk rate.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

RESERVE_MARGIN = 1.5  # our choice: the last evaluation may be half slower than the one before
# A network disk; a checkpoint of the 307M model (2.6 GB) is then expected to take 26 s.
ASSUMED_DISK_BYTES_PER_SECOND = 100e6
# Sealing the evidence: hashes of a few MB, a zip, figures. Our choice, about ten times what the
# smoke runs take.
FINISHING_SECONDS = 20.0
# The reserve never takes more than this part of the budget, or a short run would not start.
RESERVE_LIMIT = 0.25
STEPS_AVERAGED = 50


@dataclass(kw_only=True)
class Budget:
    """The clock of one run: `clock` returns seconds, `started_at` is its value at the first cell.

    `earlier_seconds` is what earlier sessions of the run used. They count against the budget if
    `counts_earlier` (a schedule in time runs over all sessions together); else the budget is that
    of each session. Fields named *_seconds are in seconds; no budget_seconds, no limit.
    """

    clock: Callable[[], float]
    started_at: float
    budget_seconds: float | None
    eval_every: int  # steps
    checkpoint_every_seconds: float
    earlier_seconds: float = 0.0
    counts_earlier: bool = True
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_AVERAGED))

    def elapsed(self) -> float:
        """Seconds that the run has taken, over all its sessions."""
        return self.earlier_seconds + self.clock() - self.started_at

    def left(self) -> float:
        """Seconds until training must have stopped; infinite without a budget."""
        if self.budget_seconds is None:
            return float("inf")
        used = self.elapsed() - (0.0 if self.counts_earlier else self.earlier_seconds)
        return self.budget_seconds - used - self.reserve_seconds

    def expect_checkpoint_bytes(self, size: int) -> None:
        """Estimates the checkpoint time before one has been written."""
        self.checkpoint_seconds = size / ASSUMED_DISK_BYTES_PER_SECOND

    def record_step(self, seconds: float) -> None:
        """Notes the time of one training step, compilation excluded."""
        self._steps.append(seconds)

    @property
    def timed_steps(self) -> int:
        """Steps that the mean is made of, at most 50."""
        return len(self._steps)

    @property
    def step_seconds(self) -> float:
        """Mean time of the last steps; 0 before the first."""
        return sum(self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def reserve_seconds(self) -> float:
        """Seconds kept for the last evaluation, the last checkpoint and the evidence."""
        needed = self.evaluation_seconds + self.checkpoint_seconds + FINISHING_SECONDS
        return min(RESERVE_MARGIN * needed, RESERVE_LIMIT * (self.budget_seconds or 0.0))

    def is_used_up(self) -> bool:
        """Whether another step would cut into the reserve."""
        return self.left() < self.step_seconds

    @property
    def overall_step_seconds(self) -> float:
        """What a step costs with its share of evaluations and checkpoints; infinite if checkpoints
        take all the time between them."""
        seconds = self.step_seconds + self.evaluation_seconds / self.eval_every
        training = 1 - self.checkpoint_seconds / self.checkpoint_every_seconds
        return seconds / training if training > 0 else float("inf")

    def predict_final_step(self, *, step: int, max_steps: int | None) -> int | None:
        """The step at which the run will end at the present speed, or None if nothing limits it."""
        if self.budget_seconds is None or not self._steps:
            return max_steps
        predicted = step + max(0, int(self.left() / self.overall_step_seconds))
        return predicted if max_steps is None else min(predicted, max_steps)
