# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a pure function of progress.

    rate(s, p) = peak * min(1, (s + 1) / warmup_steps) * shape(p)
    cosine:   shape(p) = floor + (1 - floor) * (1 + cos(pi p)) / 2
    wsd:      shape(p) = 1 until p = 1 - decay, then linear down to floor at p = 1
    constant: shape(p) = 1

s = updates already done (0 before the first); p = the used fraction of the horizon, in [0, 1]:
elapsed seconds / budget (time), s / max_steps (steps) or s * tokens a step / max_tokens (tokens).
Warm-up multiplies the shape instead of delaying it, so that a horizon in seconds and one in steps
mean the same thing. `floor` and `decay` are fractions (of the peak, and of the horizon).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atomic_lib.config import TrainConfig

ScheduleShape = Literal["cosine", "wsd", "constant"]
ScheduleUnit = Literal["time", "steps", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate of one run, by elapsed time, steps or tokens.

    `horizon` is in the unit of `unit`: seconds, steps or tokens. Raises ValueError at construction
    for a horizon that is not positive or fractions outside [0, 1].
    """

    shape: ScheduleShape
    unit: ScheduleUnit
    peak: float
    horizon: float
    warmup_steps: int
    tokens_per_step: int
    decay_fraction: float = 0.1
    floor_fraction: float = 0.1

    def __post_init__(self):
        if not self.horizon > 0:
            raise ValueError(f"horizon: {self.horizon} {self.unit} must be greater than 0")
        for name in ("decay_fraction", "floor_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: {value} is outside [0, 1]")

    def progress(self, *, step: int, elapsed_seconds: float) -> float:
        """Used fraction of the horizon in [0, 1] once `step` updates are done."""
        used = {
            "time": elapsed_seconds,
            "steps": step,
            "tokens": step * self.tokens_per_step,
        }[self.unit]
        return min(1.0, max(0.0, used / self.horizon))

    def rate(self, *, step: int, elapsed_seconds: float) -> float:
        """Learning rate of the update that follows `step` finished ones."""
        progress = self.progress(step=step, elapsed_seconds=elapsed_seconds)
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.peak * warmup * self._shape_factor(progress)

    def _shape_factor(self, progress: float) -> float:
        if self.shape == "constant":
            return 1.0
        if self.shape == "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        elif self.decay_fraction > 0:
            remaining = min(1.0, (1 - progress) / self.decay_fraction)
        else:
            remaining = 1.0
        return self.floor_fraction + (1 - self.floor_fraction) * remaining


@dataclass(frozen=True)
class RecordedSchedule:
    """Replays the learning rates that another run wrote to its metrics.jsonl.

    A wall-clock schedule depends on how fast the machine was; with the recorded rates the run can
    be repeated bit for bit on any clock.
    """

    rates: Mapping[int, float]  # by the number of updates done before the step
    fractions: Mapping[int, float]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "RecordedSchedule":
        """Takes the train rows among `rows` (metrics.jsonl, superseded rows already removed)."""
        train_rows = [row for row in rows if row.get("kind") == "train"]
        if not train_rows:
            raise ValueError("the metrics to replay hold no train row")
        return cls(
            rates={row["step"] - 1: row["lr"] for row in train_rows},
            fractions={row["step"] - 1: row["elapsed_fraction"] for row in train_rows},
        )

    @property
    def last_step(self) -> int:
        """The last step that the record has."""
        return max(self.rates) + 1

    def _recorded(self, values: Mapping[int, float], step: int) -> float:
        if step not in values:
            raise ValueError(
                f"the metrics to replay have no row for step {step + 1}; they end at step "
                f"{self.last_step}. Set max_steps to at most that."
            )
        return values[step]

    def progress(self, *, step: int, elapsed_seconds: float) -> float:
        """Fraction of the horizon as it was recorded; `elapsed_seconds` is not used."""
        return self._recorded(self.fractions, step)

    def rate(self, *, step: int, elapsed_seconds: float) -> float:
        """Learning rate as it was recorded; `elapsed_seconds` is not used."""
        return self._recorded(self.rates, step)


def schedule_from_config(config: TrainConfig) -> Schedule:
    """Builds the schedule that a training configuration describes."""
    horizons = {
        "time": config.budget_seconds,
        "steps": config.max_steps,
        "tokens": config.max_tokens,
    }
    horizon = horizons[config.schedule_unit]
    if horizon is None:
        raise ValueError(f"schedule_unit {config.schedule_unit!r}: the run has no such limit")
    return Schedule(
        shape=config.schedule,
        unit=config.schedule_unit,
        peak=config.learning_rate,
        horizon=horizon,
        warmup_steps=config.warmup_steps,
        tokens_per_step=config.tokens_per_step,
        decay_fraction=config.decay_fraction,
        floor_fraction=config.floor_fraction,
    )
