# SPDX-License-Identifier: Apache-2.0
"""When a run must stop so that everything after training still fits into its time budget.

The budget is wall clock from the first notebook cell; time that earlier sessions of the same run
used is added. Training stops before the step that would end after

    budget - margin * (last evaluation + last checkpoint + finishing)

Evaluation and checkpoint times are those of this run. Until a checkpoint has been written its time
is its size over an assumed disk rate.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

RESERVE_MARGIN = 1.5  # our choice: the last evaluation may be half slower than the one before
# A network disk; a checkpoint of the 307M model (2.6 GB) is then expected to take 26 s.
ASSUMED_DISK_BYTES_PER_SECOND = 100e6
# Sealing the evidence: hashes of a few MB, a zip, one figure. Our choice, about ten times what the
# smoke runs take; a run that also exports states more.
FINISHING_SECONDS = 20.0
# The reserve never takes more than this part of the budget, or a short run would not start.
RESERVE_LIMIT = 0.25
STEPS_AVERAGED = 50


@dataclass(kw_only=True)
class Budget:
    """The clock of one run: `clock` returns seconds, `started_at` is its value at the first cell.

    Times below are in seconds.
    """

    clock: Callable[[], float]
    started_at: float
    budget_seconds: float | None  # None: no limit
    earlier_seconds: float = 0.0  # used by earlier sessions of this run
    finishing_seconds: float = FINISHING_SECONDS
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_AVERAGED))

    def elapsed(self) -> float:
        """Seconds that the run has used, over all its sessions."""
        return self.earlier_seconds + self.clock() - self.started_at

    def expect_checkpoint_bytes(self, size: int) -> None:
        """Estimates the checkpoint time before one has been written."""
        self.checkpoint_seconds = size / ASSUMED_DISK_BYTES_PER_SECOND

    def record_step(self, seconds: float) -> None:
        """Notes the time of one training step, compilation excluded."""
        self._steps.append(seconds)

    @property
    def step_seconds(self) -> float:
        """Mean time of the last steps; 0 before the first."""
        return sum(self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def reserve_seconds(self) -> float:
        """Seconds kept for the last evaluation, the last checkpoint and the evidence."""
        needed = self.evaluation_seconds + self.checkpoint_seconds + self.finishing_seconds
        reserve = RESERVE_MARGIN * needed
        return reserve if self.budget_seconds is None else min(
            reserve, RESERVE_LIMIT * self.budget_seconds
        )  # fmt: skip

    def is_used_up(self) -> bool:
        """Whether another step would cut into the reserve."""
        if self.budget_seconds is None:
            return False
        return self.elapsed() + self.step_seconds + self.reserve_seconds > self.budget_seconds

    def predict_final_step(
        self, *, step: int, max_steps: int | None, eval_every: int, checkpoint_every_seconds: float
    ) -> int | None:
        """The step at which the run will end, from the step time so far; None without a limit.

        A step costs its own time plus its share of evaluations and checkpoints.
        """
        if self.budget_seconds is None or not self._steps:
            return max_steps
        left = self.budget_seconds - self.reserve_seconds - self.elapsed()
        step_seconds = self.step_seconds + self.evaluation_seconds / eval_every
        step_seconds /= max(1e-3, 1 - self.checkpoint_seconds / checkpoint_every_seconds)
        predicted = step + max(0, int(left / step_seconds))
        return predicted if max_steps is None else min(predicted, max_steps)
