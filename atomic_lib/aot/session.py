# SPDX-License-Identifier: Apache-2.0
"""How far a run gets in its session, and what it leaves on the disk."""

import math
from dataclasses import dataclass

from atomic_lib.aot.memory import Problem
from atomic_lib.config import TrainConfig
from atomic_lib.train.budget import Budget

GB = 1e9
# Kaggle keeps this much of /kaggle/working.
KAGGLE_DISK_BYTES = 20e9
# Validation targets of windmaple/openwebtext-gpt2, used where the file does not say.
ASSUMED_VALIDATION_TARGETS = 4_390_912
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """What a step time makes of the time budget; None where the run has no limit."""

    budget_seconds: float | None
    compile_seconds: float  # of both programs, as measured on the machine that compiled
    evaluation_batches: int
    evaluation_seconds: float
    evaluations: int | None
    final_step: int | None
    tokens: int | None


def plan_session(
    config: TrainConfig, *, step_seconds: float, evaluation_step_seconds: float,
    compile_seconds: float, state_bytes: int,
) -> SessionPlan:  # fmt: skip
    """Runs the trainer's own budget arithmetic with predicted times.

    The compile time stands for all that happens before the first step. A checkpoint takes its
    bytes over the disk rate that `Budget` assumes.
    """
    per_batch = config.tokens_per_step
    per_evaluation_batch = (config.eval_batch_size or config.batch_size) * config.sequence_length
    batches = config.eval_batches or max(1, ASSUMED_VALIDATION_TARGETS // per_evaluation_batch)
    evaluation_seconds = batches * evaluation_step_seconds
    budget = Budget(
        clock=lambda: compile_seconds,
        started_at=0.0,
        budget_seconds=config.budget_seconds,
        eval_every=config.eval_every,
        checkpoint_every_seconds=config.checkpoint_seconds,
        evaluation_seconds=evaluation_seconds,
    )
    budget.expect_checkpoint_bytes(state_bytes)
    budget.record_step(step_seconds)
    limits = [config.max_steps, config.max_tokens and math.ceil(config.max_tokens / per_batch)]
    final_step = budget.predict_final_step(
        step=0,
        max_steps=min((limit for limit in limits if limit), default=None),
    )
    return SessionPlan(
        budget_seconds=config.budget_seconds,
        compile_seconds=compile_seconds,
        evaluation_batches=batches,
        evaluation_seconds=evaluation_seconds,
        evaluations=None if final_step is None else final_step // config.eval_every,
        final_step=final_step,
        tokens=None if final_step is None else final_step * per_batch,
    )


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """Bytes that the run writes, against the disk of a Kaggle session."""

    checkpoint_bytes: int
    checkpoints: int  # kept, and the one that is being written
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that can lie on the disk at one time, one export included."""
        return self.checkpoint_bytes * self.checkpoints + self.export_bytes

    def problem(self) -> Problem | None:
        """The problem of a disk that is too small, None if it is not."""
        if self.total_bytes <= KAGGLE_DISK_BYTES:
            return None
        kept = max(1, int((KAGGLE_DISK_BYTES - self.export_bytes) // self.checkpoint_bytes) - 1)
        advice = f"keep_checkpoints {kept}" if kept < self.checkpoints - 1 else "a smaller preset"
        return Problem(
            what="disk of a Kaggle session",
            needed=self.total_bytes / GB,
            allowed=KAGGLE_DISK_BYTES / GB,
            unit="GB",
            advice=(f"{advice} is needed",),
        )


def plan_disk(config: TrainConfig, state_bytes: int) -> DiskPlan:
    """Checkpoints hold the whole training state; an export holds the parameters in float32."""
    return DiskPlan(
        checkpoint_bytes=state_bytes,
        checkpoints=config.keep_checkpoints + 1,
        export_bytes=FLOAT32_BYTES * config.model_config.parameter_count,
    )
