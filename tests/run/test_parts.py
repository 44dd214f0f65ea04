# SPDX-License-Identifier: Apache-2.0
"""The runner's parts without a kernel: names, parameters, environment, progress, no jax.

Oracle: literal files, clocks and environments made here; for parameters, this repository's own
parameter files with one mistake put in.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny_repository import REPOSITORY, write_notebook, write_parameters

from atomic_lib.run.command import main
from atomic_lib.run.display import PlainDisplay, clock_text, position_text
from atomic_lib.run.jobs import Job, Roots, available, check_jobs, find_jobs
from atomic_lib.run.kernel import child_environment
from atomic_lib.run.watch import Position, Watcher


def test_names_mean_the_same_job_in_every_spelling(roots: Roots, monkeypatch):
    write_parameters(roots, "smoke")
    write_parameters(roots, "seed1")
    monkeypatch.chdir(roots.root / "params" / "tiny")
    spellings = ["params/tiny/smoke.yaml", "tiny/smoke", "smoke", "smoke.yaml"]
    spellings.append(str(roots.root / "params" / "tiny" / "smoke.yaml"))
    for spelling in spellings:
        assert [job.name for job in find_jobs([spelling], roots)] == ["tiny/smoke"], spelling
    job = find_jobs(["tiny/seed1", "smoke", "tiny/smoke"], roots)
    assert [one.name for one in job] == ["tiny/seed1", "tiny/smoke"]
    assert job[0].folder == roots.root / "outputs" / "tiny-seed1"


def test_run_alone_means_every_notebook_in_order(roots: Roots):
    write_notebook(roots.root / "notebooks" / "01_second.ipynb")
    write_parameters(roots, "smoke")
    shutil.copytree(roots.root / "params" / "tiny", roots.root / "params" / "second")
    assert [job.name for job in find_jobs(["smoke"], roots)] == ["tiny/smoke", "second/smoke"]
    assert [job.name for job in available(roots)] == ["tiny/smoke", "second/smoke"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("params/tiny/smok.yaml", "did you mean tiny/smoke?"),
        ("tini/smoke", "did you mean tiny/smoke?"),
        ("xyz", "there are tiny/smoke"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(roots: Roots, name: str, hint: str, capsys):
    write_parameters(roots, "smoke")
    assert main([name], roots=roots) == 2
    message = capsys.readouterr().err
    assert repr(name) in message
    assert hint in message


def test_no_name_and_help_explain_themselves(capsys: pytest.CaptureFixture[str]):
    for arguments, code in ([], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        printed = capsys.readouterr()
        assert "PARAMS" in printed.out + printed.err


def test_list_names_every_parameter_file_that_has_a_notebook(roots: Roots, capsys):
    write_parameters(roots, "smoke")
    write_parameters(roots, "seed1")
    assert main(["--list"], roots=roots) == 0
    assert capsys.readouterr().out.split() == ["tiny/seed1", "tiny/smoke"]


def test_folder_that_the_notebook_would_not_open_is_refused(roots: Roots):
    jobs = find_jobs([write_parameters(roots, "smoke")], roots)
    with pytest.raises(ValueError, match=r"smoke\.yaml: run id 'tiny-seed1' must be 'tiny-smoke'"):
        check_jobs(jobs, lambda job: "tiny-seed1")


MISTAKES = {
    "typo": ({"learning_rat": 1e-3}, "learning_rat", "learning_rate"),
    "word for a number": ({"max_steps": "many"}, "max_steps", "many"),
    "unknown choice": ({"schedule": "cosin"}, "schedule", "cosin"),
    "impossible": ({"sequence_length": -1}, "sequence_length", "-1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_parameter_file_starts_nothing(tmp_path: Path, mistake: str, capsys):
    changes, *words = MISTAKES[mistake]
    source = REPOSITORY / "params" / "train_hybrid" / "smoke.yaml"
    values = yaml.safe_load(source.read_text(encoding="utf-8")) | changes | {"run": "wrong"}
    folder = tmp_path / "params" / "train_hybrid"
    folder.mkdir(parents=True)
    (folder / "wrong.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path / "notebooks" / "03_train_hybrid.ipynb")
    assert main(["train_hybrid/wrong"], roots=Roots.of(tmp_path)) == 2
    message = capsys.readouterr().err
    for word in ("wrong.yaml", *words):
        assert word in message
    assert not (tmp_path / "outputs").exists()


def test_runner_never_imports_jax():
    source = (
        "import sys\n"
        "from atomic_lib.run.command import main\n"
        "from atomic_lib.run.jobs import Roots, available, load_parameters\n"
        "main(['--list'])\n"
        "jobs = available(Roots.of(sys.argv[1]))\n"
        "ids = [load_parameters(job) for job in jobs]\n"
        "assert ids == [job.folder.name for job in jobs], ids\n"
        "print('jax modules:', sorted({'jax', 'jaxlib', 'flax', 'libtpu'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", source, str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.endswith("jax modules: []\n"), done.stdout + done.stderr


def job_at(root: Path) -> Job:
    return Job(
        notebook="tiny", run="a", notebook_file=root / "n.ipynb", parameter_file=root / "a.yaml",
        folder=root / "outputs" / "tiny-a", root=root,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("present", "inherited", "expected"),
    [(False, {}, "cpu"), (True, {}, None), (False, {"JAX_PLATFORMS": "tpu,cpu"}, "tpu,cpu")],
    ids=["no accelerator", "accelerator", "already chosen"],
)
def test_jax_platform_of_the_kernel(tmp_path, monkeypatch, present, inherited, expected):
    monkeypatch.setattr("atomic_lib.run.kernel.accelerator_present", lambda: present)
    environment = child_environment(job_at(tmp_path), inherited)
    assert environment.get("JAX_PLATFORMS") == expected


def test_kernel_finds_the_packages_before_inherited_paths(tmp_path: Path):
    environment = child_environment(job_at(tmp_path), {"PYTHONPATH": "/other", "HOME": "/h"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/other"]
    assert environment["HOME"] == "/h"


class Clock:
    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        return self.now


def beat(folder: Path, at: float, done: int, stage: str = "train") -> None:
    text = {"time": at, "pid": 1, "stage": stage, "done": done, "total": 60, "text": "loss 3"}
    (folder / "heartbeat.json").write_text(json.dumps(text))


def test_watcher_estimates_what_is_left_from_the_stage_alone(tmp_path: Path):
    clock = Clock(1000.0)
    watcher = Watcher(tmp_path, clock=clock)
    beat(tmp_path, 1010.0, 20)
    clock.now = 1010.0
    assert watcher.look().remaining_seconds is None
    beat(tmp_path, 1015.0, 30)
    clock.now = 1016.0
    position = watcher.look()
    assert position.remaining_seconds == pytest.approx(15.0)  # 30 more at 2 a second
    assert position.elapsed_seconds == pytest.approx(16.0)
    beat(tmp_path, 1020.0, 0, stage="export")
    assert watcher.look().remaining_seconds is None


def test_watcher_does_not_believe_an_old_or_half_written_file(tmp_path: Path):
    beat(tmp_path, 999.0, 20)
    watcher = Watcher(tmp_path, clock=Clock(1000.0))
    assert watcher.look().stage == "starting"
    (tmp_path / "heartbeat.json").write_text('{"time": 1001.0, "sta')
    (tmp_path / "notebook.ipynb").write_text('{"cells": [')
    assert watcher.look() == Position()


def test_watcher_counts_executed_cells(tmp_path: Path):
    write_notebook(tmp_path / "notebook.ipynb")
    notebook = json.loads((tmp_path / "notebook.ipynb").read_text())
    watcher = Watcher(tmp_path)
    assert (watcher.look().cells_done, watcher.look().cells) == (0, 5)
    for cell in notebook["cells"][1:3]:
        cell["execution_count"] = 1
    (tmp_path / "notebook.ipynb").write_text(json.dumps(notebook))
    position = watcher.look()
    assert (position.cells_done, position.cells, position.fraction) == (2, 5, 0.4)


def test_plain_lines_come_every_ten_seconds_while_something_moves(tmp_path: Path):
    clock, out = Clock(0.0), io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), clock=clock)
    display.begin(job_at(tmp_path), 2, 7)
    for seconds in range(1, 100):
        clock.now = float(seconds)
        stage, done = ("train", seconds) if seconds < 22 else ("export", 22)
        display.update(Position(stage=stage, done=done, total=60, elapsed_seconds=seconds))
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "starting", "train 1/60", "train 11/60", "train 21/60", "export 22/60",
        "export 22/60",
    ]  # fmt: skip
    assert all(line.startswith("[2/7] tiny/a  ") for line in lines)
    assert lines[-1].endswith("1:22 elapsed")  # a minute after it last moved


def test_times_and_positions_read_as_people_write_them():
    assert [clock_text(s) for s in (0, 59.6, 61, 3600, 32_040)] == [
        "0:00", "1:00", "1:01", "1:00:00", "8:54:00",
    ]  # fmt: skip
    position = Position(
        cells_done=5, cells=12, stage="train", done=40, total=60, text="loss 3.21",
        elapsed_seconds=35, remaining_seconds=12,
    )  # fmt: skip
    assert position_text(position) == (
        "cell 5/12  train 40/60  loss 3.21  0:35 elapsed, 0:12 left in train"
    )
