# SPDX-License-Identifier: Apache-2.0
"""The runner's loop and its command line."""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console

from atomic_lib.evidence.lock import locked_by
from atomic_lib.evidence.run_folder import HEARTBEAT, clear_result
from atomic_lib.evidence.verify import NOTEBOOK
from atomic_lib.run.display import Display, choose_display, show_summary
from atomic_lib.run.jobs import Job, Roots, available, check_jobs, find_jobs, load_parameters
from atomic_lib.run.kernel import NotebookProcess, child_environment
from atomic_lib.run.outcome import Outcome, close_run
from atomic_lib.run.watch import Watcher

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.25
# A training cell that is asked to stop ends its step and saves: a 307M model takes up to a minute.
STOP_SECONDS = 180.0
LOG_COLUMNS = 140
USAGE_ERROR = 2  # argparse's own code


class StopRequest:
    """The signals that this process received while a notebook ran."""

    def __init__(self) -> None:
        self.name = ""
        self.number = 0
        self.count = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: only notes it; the loop acts."""
        self.name = self.name or signal.Signals(number).name
        self.number = self.number or number
        self.count += 1


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a request, inside the block."""
    request = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.receive) for number in signals}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_jobs(
    jobs: Sequence[Job], *, display: Display, load: Callable[[Job], str] = load_parameters
) -> tuple[list[Outcome], StopRequest]:
    """Runs the jobs one after another until one is not verified or a signal comes.

    All parameters are validated first (`load`, see `check_jobs`). Returns an outcome for every
    job, also for those not started, and the signals received.
    """
    check_jobs(jobs, load)
    outcomes: list[Outcome] = []
    with stop_requests() as request, display:
        for number, job in enumerate(jobs, 1):
            display.begin(job, number, len(jobs))
            outcome = run_job(job, display=display, request=request)
            display.end(outcome)
            outcomes.append(outcome)
            if outcome.result != "verified":
                break
    rest = jobs[len(outcomes) :]
    return outcomes + [Outcome(job=job, result="not started") for job in rest], request


def run_job(job: Job, *, display: Display, request: StopRequest) -> Outcome:
    """Runs one notebook in a child process, from a cleared result to a verified or failed one."""
    job.folder.mkdir(parents=True, exist_ok=True)
    owner = locked_by(job.folder)
    if owner:
        reason = f"process {owner} is writing to {job.folder}; wait for it or stop it"
        return Outcome(job=job, result="failed", reason=reason)
    clear_result(job.folder)
    for name in (NOTEBOOK, HEARTBEAT):
        (job.folder / name).unlink(missing_ok=True)
    started_at = time.monotonic()
    with tempfile.TemporaryFile() as log:
        environment = child_environment(job, os.environ)
        process = NotebookProcess(job, log=log, environment=environment)
        try:
            exit_code = _wait(process, job, display=display, request=request)
        finally:
            process.kill()
        return close_run(
            job,
            exit_code=exit_code,
            stopped_by=request.name,
            seconds=time.monotonic() - started_at,
            log=_whole_text(log),
        )


def _wait(process: NotebookProcess, job: Job, *, display: Display, request: StopRequest) -> int:
    """Shows where the notebook is until it ends, is asked to stop, or is killed."""
    watcher = Watcher(job.folder)
    deadline: float | None = None
    while (exit_code := process.poll()) is None:
        if request.count and deadline is None:
            deadline = time.monotonic() + STOP_SECONDS
            process.ask_to_stop()
            display.say(
                f"{request.name}: asked {job.name} to save and stop (up to {STOP_SECONDS:.0f} s); "
                "once more to kill it"
            )
        if request.count > 1 or (deadline is not None and time.monotonic() > deadline):
            return -signal.SIGKILL
        display.update(watcher.look())
        time.sleep(POLL_SECONDS)
    return exit_code


def _whole_text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def make_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the summary in a log file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=LOG_COLUMNS)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m atomic_lib.run",
        description="Runs notebooks without a browser, one after another, and verifies what they "
        "leave in outputs/. The exit code is 0 only if every run verified.",
        epilog="Ctrl-C (or SIGTERM) lets a training run save a checkpoint and stop; a second one "
        "kills it. Running the same parameters again continues from the newest checkpoint.",
    )
    parser.add_argument(
        "params",
        nargs="*",
        metavar="PARAMS",
        help="params/train_hybrid/seed1.yaml, or train_hybrid/seed1, or just smoke: that run of "
        "every notebook, in their order",
    )
    parser.add_argument("--list", action="store_true", help="show every run there is and stop")
    return parser


def main(
    arguments: Sequence[str] | None = None,
    *,
    roots: Roots | None = None,
    load: Callable[[Job], str] = load_parameters,
) -> int:
    """Runs what the command line names, in this repository or in `roots`.

    Returns 0 if every run verified, 1 if not, 2 for a mistake in the names or parameters, 128 +
    the signal's number if one stopped it.
    """
    roots = roots or Roots.of(ROOT)
    parser = build_parser()
    options = parser.parse_args(arguments)
    console = make_console()
    if options.list:
        for job in available(roots):
            console.print(job.name, markup=False)
        return 0
    if not options.params:
        parser.error("name at least one PARAMS; --list shows what there is")
    try:
        jobs = find_jobs(options.params, roots)
        outcomes, request = run_jobs(jobs, display=choose_display(console), load=load)
    except (ValueError, TypeError) as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        return USAGE_ERROR
    show_summary(console, outcomes)
    if request.number:
        return 128 + request.number
    return 0 if all(outcome.result == "verified" for outcome in outcomes) else 1
