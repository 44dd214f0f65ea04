# SPDX-License-Identifier: Apache-2.0
"""What a run says while it goes: heartbeat.json each second, a printed line each half minute."""

from collections.abc import Callable, Mapping
from typing import Any

from atomic_lib.evidence import RunFolder
from atomic_lib.train.budget import Budget

PRINT_SECONDS = 30.0  # a notebook keeps every line: 9 hours of these are a thousand


class Heartbeat:
    """Tells step, loss, tokens a second, MFU, memory, and the time left to budget and target.

    `target` is the step at which the run ends if its budget lasts, or None. `clock` returns
    seconds.
    """

    def __init__(self, run: RunFolder, *, target: int | None, clock: Callable[[], float]):
        self._run = run
        self._target = target
        self._clock = clock
        self._printed_at = float("-inf")

    def tell(self, row: Mapping[str, Any], budget: Budget) -> None:
        """Tells a train row."""
        step = row["step"]
        facts = {
            "step": step,
            "target_step": self._target,
            "loss": row["loss"],
            "tok_per_s": row["tok_per_s"],
            "mfu": row["mfu"],
            "hbm": row["hbm"],
            "budget_left_s": None if budget.budget_seconds is None else budget.left(),
            "target_left_s": self._target_left(step, budget),
        }
        text = self._text(facts)
        if self._target is not None:
            self._run.progress("training", step, self._target, text, **facts)
        else:
            seconds = budget.elapsed()
            total = seconds + max(0.0, budget.left())
            self._run.progress("training", seconds, total, text, **facts)
        if self._clock() - self._printed_at >= PRINT_SECONDS:
            self._printed_at = self._clock()
            print(text, flush=True)

    def _target_left(self, step: int, budget: Budget) -> float | None:
        """Seconds to the target at the present speed, evaluations and checkpoints included."""
        if self._target is None or not budget.timed_steps:
            return None
        seconds = budget.overall_step_seconds  # infinite where checkpoints take all the time
        return (self._target - step) * seconds if seconds < float("inf") else None

    def _text(self, facts: Mapping[str, Any]) -> str:
        parts = [f"step {facts['step']:,}", f"loss {number(facts['loss'])}"]
        if self._target is not None:
            parts[0] += f" of {self._target:,}"
        if facts["tok_per_s"] is not None:
            parts.append(f"{facts['tok_per_s']:,.0f} tokens/s")
        if facts["mfu"] is not None:
            parts.append(f"MFU {facts['mfu']:.1%}")
        if facts["hbm"] is not None:
            parts.append(f"{facts['hbm'] / 2**30:.1f} GiB")
        if facts["target_left_s"] is not None:
            parts.append(f"{_duration(facts['target_left_s'])} to step {self._target:,}")
        if facts["budget_left_s"] is not None:
            parts.append(f"{_duration(facts['budget_left_s'])} of budget left")
        return ", ".join(parts)


def number(value: float | None) -> str:
    """A loss as it is shown."""
    return "not finite" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
