# SPDX-License-Identifier: Apache-2.0
"""The training loop: one session of a run, from its newest checkpoint to its end.

While the device works on step n, the host reads the batch of step n + 1 and writes the row of step
n - 1; it waits for the device only then. An evaluation or a checkpoint waits for all steps first.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.train.budget import Budget
from atomic_lib.train.checkpoint import Checkpoint, CheckpointStore
from atomic_lib.train.decision import Decision
from atomic_lib.train.evaluation import Validation
from atomic_lib.train.interrupts import StopSignals, TrainingInterrupted
from atomic_lib.train.profiling import ProfileWindow
from atomic_lib.train.program import Program
from atomic_lib.train.record import Record
from atomic_lib.train.schedule import RecordedSchedule, Schedule
from atomic_lib.train.step import TrainState

PROFILER_ERRORS = (RuntimeError, OSError, ValueError)
PLAN_AFTER_STEPS = 20  # timed steps before the final step is predicted


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The last step of a run that its budget does not end, and why it is the last."""

    step: int
    reason: str

    @classmethod
    def of(cls, config: TrainConfig, schedule: Schedule | RecordedSchedule) -> "End | None":
        """The nearest of max_steps, max_tokens and the end of a replayed record, or None."""
        ends = []
        if config.max_steps:
            ends.append(cls(step=config.max_steps, reason="max_steps"))
        if config.max_tokens:
            steps = math.ceil(config.max_tokens / config.tokens_per_step)
            ends.append(cls(step=steps, reason="max_tokens"))
        if isinstance(schedule, RecordedSchedule):
            ends.append(cls(step=schedule.last_step, reason="completed"))
        return min(ends, key=lambda end: end.step, default=None)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step that the device has been given; its results are not known yet."""

    step: int  # finished steps once it is done
    at: float  # clock
    metrics: dict[str, Array]
    learning_rate: float
    elapsed_seconds: float
    elapsed_fraction: float


@dataclass(kw_only=True)
class Loop:
    """One session of training. `state` is after `step` finished steps."""

    config: TrainConfig
    dataset: TokenDataset
    program: Program
    validation: Validation
    schedule: Schedule | RecordedSchedule
    end: End | None
    store: CheckpointStore
    budget: Budget
    record: Record
    state: TrainState
    step: int
    saved: Checkpoint | None  # the newest one of this run
    signals: StopSignals
    profile: ProfileWindow
    predicted_final_step: int | None = None
    loop_seconds: float = 0.0  # of all steps but the first, which compiles
    host_seconds: float = 0.0  # of these, the host at work, mostly beside the device
    device_wait_seconds: float = 0.0  # of these, while the device may have had nothing to do
    _waiting: Dispatched | None = None
    _finished_at: float | None = None  # when the step before ended, if the device went straight on
    _compiled: bool = False
    _saved_at: float = 0.0
    _batch: tuple[int, np.ndarray] | None = None

    def run(self) -> str:
        """Trains until the run's end; returns the reason of the stop.

        Raises TrainingInterrupted after a signal (a checkpoint is saved first), NonFiniteError
        after too many bad steps in a row.
        """
        self._saved_at = self.budget.clock()
        try:
            reason = self._train()
        finally:
            # A trace must not outlive its run, and must not hide why the run ended.
            with contextlib.suppress(*PROFILER_ERRORS):
                self.profile.end()
        self._drain()
        if self._saved_step != self.step:
            self._save()  # before the evaluation, which takes longer to do again
        if not self._look_around().evaluated:
            self._evaluate()
        return reason

    def _train(self) -> str:
        while True:
            now = self._look_around()
            if self.step % self.config.eval_every == 0 and not now.evaluated:
                self._evaluate()
                now = self._look_around()
            if now.signal:
                self._interrupt(now.signal)
            reason = self._stop_reason(now)
            if reason is not None:
                return reason
            if now.save:
                self._save_or_note()
                now = self._look_around()
            self._profile(self.profile.begins_at(self.step + 1), self.profile.begin)
            with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
                self._train_one_step(now.elapsed_seconds)
            self._profile(self.profile.ends_at(self.step), self.profile.end)
            self.record.note_tracker_failures()

    def _profile(self, due: bool, action: Callable[[], None]) -> None:
        """Begins or ends the trace when it is due; a profiler that fails stops no training."""
        if not due:
            return
        self._drain()
        try:
            action()
        except PROFILER_ERRORS as error:
            self.record.event("profile_failed", step=self.step, reason=str(error))
        else:
            self.record.event("profile", step=self.step, active=self.profile.active)

    @property
    def _saved_step(self) -> int | None:
        return self.saved.step if self.saved else None

    def _look_around(self) -> Decision:
        """The time, the record and the signals, as all processes of the run see them."""
        return Decision(
            elapsed_seconds=self.budget.elapsed(),
            evaluated=self.step in self.record.evaluated_steps,
            out_of_time=self.budget.is_used_up(),
            save=self.budget.clock() - self._saved_at >= self.config.checkpoint_seconds,
            signal=self.signals.requested,
        ).shared()

    def _stop_reason(self, now: Decision) -> str | None:
        if self.end is not None and self.step >= self.end.step:
            return self.end.reason
        return "time" if now.out_of_time else None

    def _train_one_step(self, elapsed: float) -> None:
        began = self.budget.clock()
        compiles = not self._compiled and self._waiting is None
        if compiles:
            self.record.run.progress("compiling", 0, 0, "the training step, once a session")
        tokens = self.program.placement.place_batch(self._next_batch())
        rate = float(np.float32(self.schedule.rate(step=self.step, elapsed_seconds=elapsed)))
        fraction = self.schedule.progress(step=self.step, elapsed_seconds=elapsed)
        self.state, metrics = self.program.step(self.state, tokens, np.float32(rate))
        self.step += 1
        earlier = self._waiting
        # Unless the step before is still running now, the device has waited for this dispatch.
        # (jax's type stub does not know is_ready.)
        has_waited = earlier is None or earlier.metrics["loss"].is_ready()  # type: ignore[attr-defined]
        self._waiting = Dispatched(
            step=self.step,
            at=began,
            metrics=metrics,
            learning_rate=rate,
            elapsed_seconds=elapsed,
            elapsed_fraction=fraction,
        )
        self._read_ahead()
        waited = self._collect(earlier)
        spent = self.budget.clock() - began
        if not compiles:
            self.loop_seconds += spent
            self.host_seconds += spent - waited
            if has_waited:
                self.device_wait_seconds += spent - waited

    def _next_batch(self) -> np.ndarray:
        if self._batch is None or self._batch[0] != self.step:
            self._read_ahead()
        assert self._batch is not None
        return self._batch[1]

    def _read_ahead(self) -> None:
        """Reads the batch of the step that comes next."""
        if self.end is not None and self.step >= self.end.step:
            return
        batch = self.dataset.train_batch(
            self.config.data_seed,
            self.step,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
            rows=self.program.placement.local_rows(self.config.batch_size),
        )
        self._batch = (self.step, batch)

    def _collect(self, done: Dispatched | None) -> float:
        """Waits for a dispatched step and writes its row; returns the seconds it waited."""
        if done is None:
            return 0.0
        began = self.budget.clock()
        values = jax.device_get(done.metrics)
        now = self.budget.clock()
        seconds = None  # the first step compiles
        if self._compiled:
            seconds = now - (done.at if self._finished_at is None else self._finished_at)
            self.budget.record_step(seconds)
        self._finished_at, self._compiled = now, True
        self.record.train_row(done, values, step_seconds=seconds, budget=self.budget)
        if not values["finite"]:
            self._note_skipped(done, values)
        self._plan()
        return now - began

    def _drain(self) -> None:
        """Collects the step in flight; whatever follows is no part of a step's time."""
        done, self._waiting = self._waiting, None
        self._collect(done)
        self._finished_at = None

    def _note_skipped(self, done: Dispatched, values: Mapping[str, Any]) -> None:
        windows = self.dataset.train_windows(
            self.config.data_seed,
            done.step - 1,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
        )
        in_a_row = int(values["skipped_in_a_row"])
        self.record.event("skipped", step=done.step, in_a_row=in_a_row, windows=windows.tolist())
        if in_a_row >= self.config.max_skipped_in_a_row:
            raise NonFiniteError(
                f"{in_a_row} steps in a row, the last one {done.step}, had a loss or gradient that "
                f"is not finite; the last good checkpoint is that of step {self._saved_step}. "
                "Lower learning_rate or look at the windows named in metrics.jsonl."
            )

    def _plan(self) -> None:
        if self.predicted_final_step is None and self.budget.timed_steps >= PLAN_AFTER_STEPS:
            self.predicted_final_step = self.budget.predict_final_step(
                step=self.step,
                max_steps=self.end.step if self.end else None,
            )
            self.record.event(
                "plan", step=self.step, predicted_final_step=self.predicted_final_step
            )

    def _evaluate(self) -> None:
        self._drain()
        began = self.budget.clock()
        tell = self.record.evaluation_progress(self.step)

        def progress(done: int, total: int) -> None:
            tell(done, total)
            # An evaluation takes longer than a machine's grace. Among many processes only a look
            # around tells all of them at the same time.
            if self.signals.requested and jax.process_count() == 1:
                self._interrupt(self.signals.requested)

        values = self.validation.run(self.state.params, progress)
        self.budget.evaluation_seconds = self.budget.clock() - began
        self.record.eval_row(self.step, values, elapsed_seconds=self.budget.elapsed())

    def _save(self) -> None:
        self._drain()
        self.record.before_checkpoint()
        began = self.budget.clock()
        self.saved = self.store.save(
            self.state,
            step=self.step,
            facts={
                "tokens": self.step * self.config.tokens_per_step,
                "elapsed_seconds": self.budget.elapsed(),
                "data_seed": self.config.data_seed,
                "dropout_seed": self.config.dropout_seed,
            },
        )
        self._saved_at = self.budget.clock()
        self.budget.checkpoint_seconds = self._saved_at - began
        self.record.event("checkpoint", step=self.step, seconds=self._saved_at - began)

    def _save_or_note(self) -> None:
        """A checkpoint on the way: a full disk is noted and tried again, training goes on."""
        try:
            self._save()
        except OSError as error:
            self._saved_at = self.budget.clock()
            self.record.event("checkpoint_failed", step=self.step, reason=str(error))

    def _interrupt(self, name: str) -> None:
        self._drain()
        if self._saved_step != self.step:
            self._save_or_note()
        saved = self._saved_step
        self.record.event("interrupted", step=self.step, signal=name, saved_step=saved)
        raise TrainingInterrupted(
            f"{name} stopped training at step {self.step}; the last checkpoint is that of step "
            f"{saved}. Run the notebook again to go on from there."
        )
