# SPDX-License-Identifier: Apache-2.0
"""What a training run writes down while it goes, and to whom it shows the rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder, effective_rows
from atomic_lib.model.gate_statistics import GateStatistics
from atomic_lib.train.budget import Budget
from atomic_lib.train.heartbeat import Heartbeat, number
from atomic_lib.train.speed import device_memory_bytes, model_flops_utilisation
from atomic_lib.train.trackers import Trackers

Row = dict[str, Any]
OnProgress = Callable[[list[Row]], None]

CALLBACK_SECONDS = 5.0


class Record:
    """The rows of one run, in metrics.jsonl and in memory (`rows`, superseded ones left out).

    `clock` returns seconds; `on_progress` is called with `rows` every few seconds; `trackers` get
    each row.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrainConfig,
        *,
        devices: list[jax.Device],
        clock: Callable[[], float],
        heartbeat: Heartbeat,
        trackers: Trackers,
        on_progress: OnProgress | None = None,
    ):
        self.run = run
        self.rows: list[Row] = effective_rows(run.metrics.rows())
        self._config = config
        self._devices = devices
        self._clock = clock
        self._heartbeat = heartbeat
        self._trackers = trackers
        self._on_progress = on_progress
        self._gates: GateStatistics | None = None  # of the last step
        self._flops_per_token = config.model_config.flops_per_token(config.sequence_length)
        self._called_at = float("-inf")

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps that have an eval row."""
        return {row["step"] for row in self.rows if row["kind"] == "eval"}

    def evaluations(self) -> list[Row]:
        """Eval rows, in order of their steps."""
        return [row for row in self.rows if row["kind"] == "eval"]

    def begin(self, **facts: Any) -> None:
        """Writes the header of a new log, or checks the one that is there."""
        self.run.metrics.start(
            run_id=self.run.run_id, tokens_per_step=self._config.tokens_per_step, **facts
        )
        self.rows = effective_rows(self.run.metrics.rows())

    def event(self, event: str, **fields: Any) -> None:
        """Writes an event row."""
        self._append("event", event=event, **fields)
        if event == "resume":
            self.rows = effective_rows(self.rows)

    def train_row(
        self,
        done: Any,
        values: Mapping[str, Any],
        *,
        step_seconds: float | None,
        budget: Budget,
    ) -> None:
        """Writes the row of a finished step (a `loop.Dispatched` and its metrics on the host)."""
        tokens = self._config.tokens_per_step
        speed = tokens / step_seconds if step_seconds else None
        self._gates = values["gates"]
        row = self._append(
            "train",
            step=done.step,
            tokens=done.step * tokens,
            loss=float(values["loss"]),
            lr=done.learning_rate,
            grad_norm=float(values["grad_norm"]),
            clipped=bool(values["clipped"]),
            finite=bool(values["finite"]),
            skipped=int(values["skipped"]),
            clip_rate=int(values["clipped_steps"]) / done.step,
            **_saturation(self._gates),
            elapsed_s=done.elapsed_seconds,
            elapsed_fraction=done.elapsed_fraction,
            tok_per_s=speed,
            step_ms=step_seconds * 1e3 if step_seconds else None,
            mfu=self._utilisation(speed),
            hbm=device_memory_bytes(self._devices[0]),
        )
        self._heartbeat.tell(row, budget)
        self._call_back()

    def eval_row(self, step: int, values: Mapping[str, Any], *, elapsed_seconds: float) -> None:
        """Writes the row of an evaluation (`values` from `Validation.run`) and says it."""
        row = self._append(
            "eval",
            step=step,
            tokens=step * self._config.tokens_per_step,
            **values,
            elapsed_s=elapsed_seconds,
        )
        if self._gates is not None:
            self.event(
                "gates",
                step=step,
                mixers=self._config.model_config.gated_mixers,
                **self._gates._asdict(),
            )
        exact = row["bpb_exact"]
        print(
            f"step {step:,}: validation loss {number(row['ce'])}, bits per byte "
            f"{number(row['bpb_est'])} estimated"
            + (f", {number(exact)} exact" if exact is not None else ""),
            flush=True,
        )
        self._call_back(force=True)

    def evaluation_progress(self, step: int) -> Callable[[int, int], None]:
        """A callback for `Validation.run` that keeps the heartbeat going."""

        def tell(done: int, total: int) -> None:
            self.run.progress("evaluating", done, total, f"validation at step {step:,}")

        return tell

    def before_checkpoint(self) -> None:
        """Brings every row to the disk: no checkpoint knows of a step that the log does not."""
        self.run.metrics.sync()

    def _append(self, kind: str, **fields: Any) -> Row:
        row = self.run.metrics.append(kind, **fields)
        self.rows.append(row)
        self._trackers.log(row)
        return row

    def note_tracker_failures(self) -> None:
        """Records, once each, the trackers that have ended."""
        for name, reason in self._trackers.failures():
            self.event("tracker_failed", tracker=name, reason=reason)
            print(f"tracker {name} has ended: {reason}; training goes on", flush=True)

    def _utilisation(self, tokens_per_second: float | None) -> float | None:
        if tokens_per_second is None:
            return None
        return model_flops_utilisation(
            tokens_per_second,
            flops_per_token=self._flops_per_token,
            devices=len(self._devices),
            device_kind=self._devices[0].device_kind,
        )

    def _call_back(self, *, force: bool = False) -> None:
        now = self._clock()
        if self._on_progress is not None and (force or now - self._called_at >= CALLBACK_SECONDS):
            self._called_at = now
            self._on_progress(self.rows)


def _saturation(gates: GateStatistics | None) -> dict[str, float]:
    """Shares over all mixers, each of which has as many gates, and the lowest decay of any."""
    if gates is None:
        return {}
    *shares, decay_min = GateStatistics._fields
    means = {name: float(np.mean(getattr(gates, name))) for name in shares}
    return {**means, decay_min: float(np.min(gates.decay_min))}
