# SPDX-License-Identifier: Apache-2.0
"""What a training run writes down and says while it goes: rows, heartbeat, a line now and then."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder, effective_rows
from atomic_lib.train.budget import Budget
from atomic_lib.train.speed import device_memory_bytes, model_flops_utilisation

Row = dict[str, Any]
OnProgress = Callable[[list[Row]], None]

PRINT_SECONDS = 30.0  # a notebook keeps every line: 9 hours of these are a thousand
CALLBACK_SECONDS = 5.0


class Record:
    """The rows of one run, in metrics.jsonl and in memory (`rows`, superseded ones left out).

    `clock` returns seconds; `on_progress` is called with `rows` every few seconds.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrainConfig,
        *,
        devices: list[jax.Device],
        clock: Callable[[], float],
        max_steps: int | None,
        on_progress: OnProgress | None = None,
    ):
        self.run = run
        self.rows: list[Row] = effective_rows(run.metrics.rows())
        self._config = config
        self._devices = devices
        self._clock = clock
        self._max_steps = max_steps
        self._on_progress = on_progress
        self._flops_per_token = config.model_config.flops_per_token(config.sequence_length)
        self._printed_at = self._called_at = float("-inf")

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
            elapsed_s=done.elapsed_seconds,
            elapsed_fraction=done.elapsed_fraction,
            tok_per_s=speed,
            step_ms=step_seconds * 1e3 if step_seconds else None,
            mfu=self._utilisation(speed),
            hbm=device_memory_bytes(self._devices[0]),
        )
        self._tell(row, budget)

    def eval_row(self, step: int, values: Mapping[str, Any], *, elapsed_seconds: float) -> None:
        """Writes the row of an evaluation (`values` from `Validation.run`) and says it."""
        row = self._append(
            "eval",
            step=step,
            tokens=step * self._config.tokens_per_step,
            **values,
            elapsed_s=elapsed_seconds,
        )
        exact = row["bpb_exact"]
        print(
            f"step {step:,}: validation loss {_number(row['ce'])}, bits per byte "
            f"{_number(row['bpb_est'])} estimated"
            + (f", {_number(exact)} exact" if exact is not None else ""),
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
        return row

    def _utilisation(self, tokens_per_second: float | None) -> float | None:
        if tokens_per_second is None:
            return None
        return model_flops_utilisation(
            tokens_per_second,
            flops_per_token=self._flops_per_token,
            devices=len(self._devices),
            device_kind=self._devices[0].device_kind,
        )

    def _tell(self, row: Row, budget: Budget) -> None:
        step, left = row["step"], budget.left()
        parts = [f"step {step:,}", f"loss {_number(row['loss'])}"]
        if self._max_steps is not None:
            parts[0] += f" of {self._max_steps:,}"
            left = min(left, (self._max_steps - step) * budget.step_seconds)
        if row["tok_per_s"] is not None:
            parts.append(f"{row['tok_per_s']:,.0f} tokens/s")
        if row["mfu"] is not None:
            parts.append(f"MFU {row['mfu']:.1%}")
        if row["hbm"] is not None:
            parts.append(f"{row['hbm'] / 2**30:.1f} GiB")
        if row["tok_per_s"] is not None and left < float("inf"):
            parts.append(f"{_duration(left)} left")
        text = ", ".join(parts)
        if self._max_steps is not None:
            self.run.progress("training", step, self._max_steps, text)
        else:
            seconds = budget.elapsed()
            self.run.progress("training", seconds, seconds + max(0.0, budget.left()), text)
        if self._clock() - self._printed_at >= PRINT_SECONDS:
            self._printed_at = self._clock()
            print(text, flush=True)
        self._call_back()

    def _call_back(self, *, force: bool = False) -> None:
        now = self._clock()
        if self._on_progress is not None and (force or now - self._called_at >= CALLBACK_SECONDS):
            self._called_at = now
            self._on_progress(self.rows)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
