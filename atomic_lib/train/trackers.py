# SPDX-License-Identifier: Apache-2.0
"""Curves for whoever watches a run: TensorBoard, and W&B or Trackio where they are installed.

metrics.jsonl is the record; these are views of it, and none of them may hurt the run. Each tracker
works in a thread of its own behind a bounded queue, so a slow disk or a dead network delays
nothing; the first failure of any kind (a missing package, an exception, a queue that fills up)
ends that tracker, and is handed to the loop once, which records it as an event.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from atomic_lib.evidence.verify import WATCH

# A step of the full model takes 0.15 s, and nobody reads more than a point a second.
ROW_SECONDS = 1.0
QUEUE_ROWS = 600  # ten minutes of rows
CLOSE_SECONDS = 10.0  # part of the 20 s that a run's budget keeps for its end

TRACKED = {
    "train": (
        "loss", "lr", "grad_norm", "clip_rate", "tok_per_s", "step_ms", "mfu", "hbm", "skipped",
        "erase_low", "erase_high", "write_low", "write_high", "decay_min",
    ),
    "eval": ("ce", "bpb_est", "bpb_exact"),
}  # fmt: skip


class Tracker(Protocol):
    """What each package is reduced to."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/watch/tensorboard; look with `tensorboard --logdir outputs`."""

    def __init__(self, run: Path, config: Mapping[str, Any]):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run / WATCH / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run named as the run folder; a resumed session goes on with it.

    Without a key (WANDB_API_KEY) it writes to RUN/watch/wandb, for `wandb sync`: asking for one
    would stop a notebook.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "atomic"),
            id=run.name,
            name=run.name,
            dir=str(run / WATCH),
            config=dict(config),
            resume="allow",
            mode=None if os.environ.get("WANDB_API_KEY") else "offline",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A Trackio run named as the run folder, in Trackio's own local store."""

    def __init__(self, run: Path, config: Mapping[str, Any]):
        import trackio

        self._trackio = trackio
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "atomic"),
            name=run.name,
            config=dict(config),
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


class Behind:
    """One tracker behind its queue. `failure` is why it has ended, or None."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self.name = name
        self.failure: str | None = None
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(QUEUE_ROWS)
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Queues one point; a full queue is the tracker's failure and not the caller's."""
        if self.failure is not None:
            return
        try:
            self._queue.put_nowait((values, step))
        except queue.Full:
            self.failure = f"{QUEUE_ROWS} points wait: it does not keep up"

    def close(self, seconds: float) -> None:
        """Lets what is queued be written, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):  # the thread is then still alive, which is told
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"did not end within {seconds:g} s"

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (point := self._queue.get()) is not None:
                tracker.log(*point)
            tracker.close()
        except BaseException as error:  # SystemExit too: whatever a package does, it ends here
            self.failure = f"{type(error).__name__}: {error}"


class Trackers:
    """The trackers of one session. `names` are keys of TRACKERS; `clock` returns seconds."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        run: Path,
        config: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._logged_at = float("-inf")
        self._told: set[str] = set()
        self._behind = [
            Behind(name, lambda make=TRACKERS[name]: make(run, config))  # type: ignore[misc]
            for name in names
        ]

    def log(self, row: Mapping[str, Any]) -> None:
        """Passes on a train row (at most one a second) or an eval row; other kinds are ignored."""
        fields = TRACKED.get(row["kind"])
        if not self._behind or fields is None:
            return
        if row["kind"] == "train":
            now = self._clock()
            if now - self._logged_at < ROW_SECONDS:
                return
            self._logged_at = now
        values = {
            f"{row['kind']}/{name}": row[name] for name in fields if row.get(name) is not None
        }
        for tracker in self._behind:
            tracker.log(values, row["step"])

    def failures(self) -> Iterator[tuple[str, str]]:
        """Name and reason of every tracker that has ended since the last call."""
        for tracker in self._behind:
            if tracker.failure is not None and tracker.name not in self._told:
                self._told.add(tracker.name)
                yield tracker.name, tracker.failure

    def close(self) -> None:
        """Ends all trackers, in CLOSE_SECONDS together at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in self._behind:
            tracker.close(max(0.1, deadline - time.monotonic()))
