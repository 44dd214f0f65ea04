# SPDX-License-Identifier: Apache-2.0
"""The runner's exit code is the truth, however the notebook's process ends.

Oracle: what the test itself did to the run (which ending it asked for, which process it killed),
the files left in the folder, and for resumed runs the rows of a run that nobody disturbed. Each
ending is one in which papermill's own exit code or saved notebook misleads: a killed kernel, a
cell that calls sys.exit(0), a failing cell after SUCCESS.json, a SUCCESS.json of an earlier run.
"""

import io
import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from tiny_repository import write_parameters

from atomic_lib.evidence import effective_rows, read_rows, verify
from atomic_lib.run.command import main
from atomic_lib.run.jobs import Job, Roots

pytestmark = pytest.mark.notebook

WAIT_SECONDS = 120.0


def run(roots: Roots, *names: str) -> int:
    """The command line, with parameters of the tiny notebook left unchecked."""
    return main(names, roots=roots, load=lambda job: f"tiny-{job.run}")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def at_step(folder: Path, step: int, act: Callable[[int], None]) -> threading.Thread:
    """Calls act(pid of the kernel) from a thread once the heartbeat says `step`."""

    def wait() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                beat = read(folder / "heartbeat.json")
            except (OSError, ValueError):
                beat = {}
            if beat.get("stage") == "train" and len(read_rows(folder / "metrics.jsonl")) > step:
                act(beat["pid"])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def measurements(folder: Path) -> list[dict]:
    """The rows that count, without what names a row's place in the file."""
    rows = [row for row in effective_rows(read_rows(folder / "metrics.jsonl"))]
    keep = [row for row in rows if row["kind"] == "train"]
    return [{k: v for k, v in row.items() if k not in ("row", "previous")} for row in keep]


def test_finished_notebook_is_sealed_verified_and_reported(
    roots: Roots, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(roots.root)
    code = run(roots, write_parameters(roots, "good", ending="succeed"))
    printed = capsys.readouterr().out
    folder = roots.outputs / "tiny-good"
    assert code == 0, printed
    assert verify(folder) == []
    success = read(folder / "SUCCESS.json")
    assert success["sealed"] is True
    assert {"notebook.ipynb", "report.html", "metrics.jsonl"} <= set(success["files"])
    assert (success["final_step"], success["final_tokens"]) == (12, 96)
    with zipfile.ZipFile(folder.with_name("tiny-good.zip")) as download:
        # The notebook made it before the seal; the runner made it again.
        assert set(download.namelist()) == {*success["files"], "SUCCESS.json", "SHA256SUMS"}
    assert "[1/1] tiny/good  starting" in printed
    assert "[1/1] tiny/good  verified after" in printed
    assert "final loss 2.8" in printed
    assert "outputs/tiny-good/report.html" in printed


ENDINGS = {
    "exit": "SystemExit: 0",
    "die": "the kernel died in a cell",
    "raise": "ValueError: the loss of step 12 is too high",
    "forget": "the notebook ended without SUCCESS.json",
    "raise after success": "ValueError: the last cell failed",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_bad_ending_is_refused_and_a_stale_success_does_not_survive_it(
    roots: Roots, ending: str, capsys: pytest.CaptureFixture[str]
):
    folder = roots.outputs / "tiny-bad"
    folder.mkdir(parents=True)
    for name in ("SUCCESS.json", "SHA256SUMS", "notebook.ipynb", "report.html"):
        (folder / name).write_text("{}")
    folder.with_name("tiny-bad.zip").write_text("of an earlier success")
    code = run(roots, write_parameters(roots, "bad", ending=ending))
    printed = capsys.readouterr().out
    assert code == 1
    assert not (folder / "SUCCESS.json").exists()
    assert not folder.with_name("tiny-bad.zip").exists()
    record = read(folder / "FAILED.json")
    assert ENDINGS[ending] in record["reason"]
    assert ENDINGS[ending] in printed
    assert verify(folder)[0].startswith("FAILED.json: the run failed: ")


def test_killed_kernel_is_refused_and_the_next_run_continues_to_the_same_rows(roots: Roots):
    assert run(roots, write_parameters(roots, "whole", ending="succeed")) == 0
    name = write_parameters(roots, "cut", ending="wait")
    folder = roots.outputs / "tiny-cut"
    killer = at_step(folder, 6, lambda pid: os.kill(pid, signal.SIGKILL))
    assert run(roots, name) == 1
    killer.join()
    assert "the kernel died in a cell" in read(folder / "FAILED.json")["reason"]
    assert verify(folder) != []
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"row": 8, "kind": "tra')  # and the power went

    write_parameters(roots, "cut", ending="succeed")
    assert run(roots, name) == 0
    assert verify(folder) == []
    events = [row["event"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "event"]
    assert events == ["repaired", "resume"]
    assert measurements(folder) == measurements(roots.outputs / "tiny-whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_the_kernel_save_and_stops_the_rest(
    roots: Roots, number: signal.Signals, capsys: pytest.CaptureFixture[str]
):
    names = [write_parameters(roots, "a", ending="wait"), write_parameters(roots, "b")]
    folder = roots.outputs / "tiny-a"
    sender = at_step(folder, 6, lambda pid: os.kill(os.getpid(), number))
    code = run(roots, *names)
    sender.join()
    printed = capsys.readouterr().out
    assert code == 128 + number
    assert read(folder / "FAILED.json")["reason"] == "interrupted by SIGTERM at step 6"
    assert f"{number.name}: asked tiny/a to save and stop" in printed
    assert "interrupted" in printed
    assert "not started" in printed
    assert not (roots.outputs / "tiny-b").exists()


def test_second_signal_kills_everything_that_the_run_started(roots: Roots):
    # This notebook's kernel ignores the first signal.
    notebook = roots.root / "notebooks" / "00_tiny.ipynb"
    notebook.write_text(notebook.read_text().replace("stopped.append(number)", "None"))
    kernels = []

    def interrupt_twice(pid: int) -> None:
        kernels.append(pid)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)

    sender = at_step(roots.outputs / "tiny-a", 6, interrupt_twice)
    assert run(roots, write_parameters(roots, "a", ending="wait")) == 128 + signal.SIGINT
    sender.join()
    assert read(roots.outputs / "tiny-a" / "FAILED.json")["reason"] == "stopped by SIGINT"
    gone, alive = psutil.wait_procs([p for p in map(process_of, kernels) if p], timeout=10)
    assert alive == [], gone


def process_of(pid: int) -> psutil.Process | None:
    return psutil.Process(pid) if psutil.pid_exists(pid) else None


def test_first_failure_stops_the_runs_after_it(roots: Roots, capsys: pytest.CaptureFixture[str]):
    names = [write_parameters(roots, "a", ending="raise"), write_parameters(roots, "b")]
    assert run(roots, *names) == 1
    assert "not started" in capsys.readouterr().out
    assert not (roots.outputs / "tiny-b").exists()


def test_run_that_another_process_writes_is_left_alone(roots: Roots, monkeypatch, capsys):
    folder = roots.outputs / "tiny-a"
    folder.mkdir(parents=True)
    (folder / "SUCCESS.json").write_text("{}")
    monkeypatch.setattr("atomic_lib.run.command.locked_by", lambda path: "4711")
    assert run(roots, write_parameters(roots, "a")) == 1
    assert "process 4711 is writing to" in capsys.readouterr().out
    assert (folder / "SUCCESS.json").read_text() == "{}"


def test_live_display_shows_cells_and_ends_with_the_same_summary(roots: Roots, monkeypatch):
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    monkeypatch.setattr("atomic_lib.run.command.make_console", lambda: console)
    assert run(roots, write_parameters(roots, "good", ending="succeed")) == 0
    shown = console.export_text()
    assert "[1/1] tiny/good  verified after" in shown
    assert "final loss 2.8" in shown


def checked(job: Job) -> str:
    raise ValueError("learning_rat: unknown parameter; did you mean learning_rate?")


def test_parameters_are_refused_before_anything_starts(
    roots: Roots, capsys: pytest.CaptureFixture[str]
):
    name = write_parameters(roots, "a", learning_rat=1)
    assert main([name], roots=roots, load=checked) == 2
    message = capsys.readouterr().err
    assert "params/tiny/a.yaml" in message.replace("\n", "")
    assert "did you mean learning_rate?" in message
    assert not roots.outputs.exists()
