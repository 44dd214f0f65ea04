# SPDX-License-Identifier: Apache-2.0
"""What a finished training run hands back, and the check that it learned something."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nats a token. The seeds of one model differ by about 0.01; a run that has learned anything of its
# text leaves the uniform guess (ln V = 10.8 for GPT-2's vocabulary) by several nats.
CLEAR_IMPROVEMENT = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. Evaluations are the rows of metrics.jsonl."""

    stop_reason: str  # "time", "max_steps", "max_tokens", or "completed" for a replay
    step: int
    tokens: int
    elapsed_seconds: float  # over all sessions
    resumed_from_step: int | None
    skipped_steps: int
    predicted_final_step: int | None  # after the first timed steps of this session
    host_fraction: float | None  # of the loop's time, the host at work, mostly beside the device
    device_wait_fraction: float | None  # of the loop's time, the device may have waited for it
    first_evaluation: dict[str, Any]
    last_evaluation: dict[str, Any]
    checkpoint: Path
    replay: dict[str, Any] | None  # the content of replay.json

    def summary(self) -> dict[str, Any]:
        """The arguments of `RunFolder.succeed`: stop_reason and the results."""
        return {
            "stop_reason": self.stop_reason,
            "validation_loss_before": self.first_evaluation["ce"],
            "validation_loss": self.last_evaluation["ce"],
            "bpb_est": self.last_evaluation["bpb_est"],
            "bpb_exact": self.last_evaluation["bpb_exact"],
            "elapsed_seconds": self.elapsed_seconds,
            "resumed_from_step": self.resumed_from_step,
            "skipped_steps": self.skipped_steps,
            "predicted_final_step": self.predicted_final_step,
            "host_fraction": self.host_fraction,
            "device_wait_fraction": self.device_wait_fraction,
            **({"replay": self.replay} if self.replay else {}),
        }


def require_improvement(
    result: TrainResult, *, minimum: float = CLEAR_IMPROVEMENT
) -> list[dict[str, Any]]:
    """Returns table rows of validation before and after training.

    Raises RuntimeError unless the loss fell by at least `minimum` nats a token.
    """
    before, after = result.first_evaluation, result.last_evaluation
    if before["step"] != 0:
        raise RuntimeError(
            f"the first evaluation of this run is of step {before['step']}, not of step 0; its "
            "metrics.jsonl has lost the beginning"
        )
    fallen = None if None in (before["ce"], after["ce"]) else before["ce"] - after["ce"]
    if fallen is None or fallen < minimum:
        raise RuntimeError(
            f"validation loss went from {before['ce']} to {after['ce']} nats a token; it must fall "
            f"by at least {minimum}. Train longer, or look at learning_rate and the data."
        )
    columns = ("step", "tokens", "ce", "bpb_est", "bpb_exact")
    return [
        {"when": when, **{name: row[name] for name in columns}, **_losses_by_length(row)}
        for when, row in (("before training", before), ("after training", after))
    ]


def _losses_by_length(row: dict[str, Any]) -> dict[str, float]:
    """A column for each longer length that an evaluation read."""
    return {f"ce at {one['length']:,} tokens": one["ce"] for one in row.get("by_length", [])}
