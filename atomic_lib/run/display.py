# SPDX-License-Identifier: Apache-2.0
"""What the person sees: a live display on a terminal, plain lines in a log file."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from atomic_lib.run.jobs import Job
from atomic_lib.run.outcome import Outcome
from atomic_lib.run.watch import Position

LINE_SECONDS = 10.0  # between plain lines of one stage
SAME_LINE_SECONDS = 60.0  # where nothing but the clock has changed, as in a long compilation
TRACEBACK_LINES = 12  # shown; FAILED.json has all


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def position_text(position: Position) -> str:
    """One line: cell, stage, how far, what the notebook says of it, time used and left."""
    parts = [f"cell {position.cells_done}/{position.cells}"] if position.cells else []
    count = f" {position.done:g}/{position.total:g}" if position.total > 0 else ""
    parts.append(f"{position.stage}{count}")
    if position.text:
        parts.append(position.text)
    left = position.remaining_seconds
    parts.append(
        f"{clock_text(position.elapsed_seconds)} elapsed"
        + (f", {clock_text(left)} left in {position.stage}" if left is not None else "")
    )
    return "  ".join(parts)


class Display(Protocol):
    """What the runner tells about its progress."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def begin(self, job: Job, number: int, count: int) -> None:
        """Run `number` of `count` starts."""

    def update(self, position: Position) -> None:
        """Called several times a second."""

    def end(self, outcome: Outcome) -> None:
        """The run that began last is over."""

    def say(self, text: str) -> None:
        """Something else that the person must read."""


class PlainDisplay:
    """Whole lines: each new stage, and one every 10 s within a stage."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._label = ""
        self._said = Position()
        self._said_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, job: Job, number: int, count: int) -> None:
        self._label = f"[{number}/{count}] {job.name}"
        self._said, self._said_at = Position(), self._clock()
        self.say(f"{self._label}  starting")

    def update(self, position: Position) -> None:
        now = self._clock()
        moved = _movement(position) != _movement(self._said)
        pause = LINE_SECONDS if moved else SAME_LINE_SECONDS
        if position.stage == self._said.stage and now - self._said_at < pause:
            return
        self._said, self._said_at = position, now
        self.say(f"{self._label}  {position_text(position)}")

    def end(self, outcome: Outcome) -> None:
        self.say(f"{self._label}  {_verdict(outcome)}")
        _show_failure(self._console, outcome)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class LiveDisplay:
    """A bar for the run and, if there are several, one for all of them."""

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[position]}", markup=False),
            console=console,
            transient=True,
        )
        self._all: TaskID | None = None
        self._current: TaskID | None = None
        self._label = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, job: Job, number: int, count: int) -> None:
        self._label = f"[{number}/{count}] {job.name}"
        if self._all is None and count > 1:
            self._all = self._progress.add_task("all runs", total=count, position="")
        if self._all is not None:
            self._progress.update(
                self._all, completed=number - 1, position=f"{number - 1} of {count} done"
            )
        self._current = self._progress.add_task(self._label, total=1.0, position="starting")

    def update(self, position: Position) -> None:
        if self._current is not None:
            self._progress.update(
                self._current, completed=position.fraction, position=position_text(position)
            )

    def end(self, outcome: Outcome) -> None:
        if self._current is not None:
            self._progress.remove_task(self._current)
        self._current = None
        self.say(f"{self._label}  {_verdict(outcome)}")
        _show_failure(self._console, outcome)

    def say(self, text: str) -> None:
        self._console.print(Text(text))


def choose_display(console: Console) -> Display:
    """The live display where the console is a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def show_summary(console: Console, outcomes: Sequence[Outcome]) -> None:
    """One row a run: result, time, key figure and where its report is."""
    table = Table(title="Runs", title_justify="left")
    for heading in ("run", "result", "time", "key figure", "report"):
        table.add_column(heading, justify="right" if heading == "time" else "left", overflow="fold")
    for outcome in outcomes:
        style = {"verified": "green", "not started": "dim"}.get(outcome.result, "bold red")
        table.add_row(
            Text(outcome.job.name),
            Text(outcome.result, style=style),
            clock_text(outcome.seconds) if outcome.seconds else "",
            Text(outcome.key_figure),
            Text(outcome.shown_report),
        )
    console.print(table)


def _movement(position: Position) -> tuple[int, float, str]:
    return position.cells_done, position.done, position.text


def _verdict(outcome: Outcome) -> str:
    return f"{outcome.result} after {clock_text(outcome.seconds)}"


def _show_failure(console: Console, outcome: Outcome) -> None:
    if outcome.result == "verified":
        return
    console.print(Text(f"  {outcome.reason}", style="red"), soft_wrap=True)
    for line in outcome.traceback[-TRACEBACK_LINES:]:
        console.print(Text(f"    {line}"), soft_wrap=True)
