# SPDX-License-Identifier: Apache-2.0
"""Protects a run against SIGKILL at any moment: between any two things that it does to its files.

A killed process loses nothing that the system has taken from it, so the folder as it stands just
before a write, a sync, a rename or a removal is what a kill at that point leaves. One run is
copied at every such point, from its first file to its seal. Random ones of these copies (fixed
seeds, spread over the run) are gone on with. Oracle: the run that nothing happened to, bit for bit;
and the copy itself, whose saved steps and rows must not be lost.
"""

import os
import random
import shutil
from pathlib import Path

import pytest
from tiny_runs import EVERY_STEP, make_config, numbers, open_run

from atomic_lib.evidence import read_rows, verify
from atomic_lib.train import train

pytestmark = pytest.mark.usefixtures("tiny_model")
# What the run's own Python calls; Orbax writes arrays in C++, inside checkpoints/partial/.
POINTS = ("write", "fsync", "replace", "rename", "unlink", "rmdir", "ftruncate")
STEPS = {"max_steps": 6, "eval_every": 3, **EVERY_STEP}
SAMPLES = 8
COMMIT_OF_3 = Path("checkpoints", "step_00000003", "commit.json")


class Copies:
    """Copies a folder before every call of the functions in POINTS."""

    def __init__(self, folder: Path, into: Path):
        self.folder, self.into = folder, into
        self.copies: list[tuple[str, Path]] = []
        self._busy = False

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in POINTS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, real):
        def call(*arguments, **options):
            if not self._busy:
                self._busy = True
                try:
                    self._copy(name)
                finally:
                    self._busy = False
            return real(*arguments, **options)

        return call

    def _copy(self, name):
        target = self.into / f"{len(self.copies):04d}"
        ignored = shutil.ignore_patterns(".lock")
        shutil.copytree(self.folder, target, ignore=ignored, copy_function=os.link)
        for log in target.glob("metrics.jsonl"):  # the one file that is written in place
            data = log.read_bytes()
            log.unlink()
            log.write_bytes(data)
        self.copies.append((name, target))


@pytest.fixture(scope="module")
def copies(tmp_path_factory, dataset, tiny_model) -> list[tuple[str, Path]]:
    base = tmp_path_factory.mktemp("killed")
    config = make_config(**STEPS)
    watching = Copies(base / "run", base)
    run = open_run(base / "run", config)
    with pytest.MonkeyPatch.context() as patch:
        watching.watch(patch)
        run.succeed(**train(run, config, dataset).summary())
    return watching.copies


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, dataset, tiny_model) -> list[dict]:
    config = make_config(**STEPS)
    run = open_run(tmp_path_factory.mktemp("untouched") / "run", config)
    train(run, config, dataset)
    return numbers(run.path)


def go_on(copy: Path, work: Path, dataset, untouched) -> None:
    """Resumes a copy to its end and checks that nothing in it was lost."""
    saved = [int(p.parent.name[-8:]) for p in copy.glob("checkpoints/step_*/commit.json")]
    log = copy / "metrics.jsonl"
    written = log.read_bytes() if log.exists() else b""
    if not (copy / "SHA256SUMS").exists():  # it is written last
        assert verify(copy), "a run that was killed before its end does not verify"
    path = shutil.copytree(copy, work / "run")
    config = make_config(**STEPS)
    run = open_run(path, config)
    result = train(run, config, dataset)
    assert result.resumed_from_step == max(saved, default=None)
    assert numbers(path) == untouched
    whole_lines = written[: written.rfind(b"\n") + 1]
    assert (path / "metrics.jsonl").read_bytes().startswith(whole_lines)
    run.succeed(**result.summary())
    assert verify(path) == []
    assert not list(path.glob("checkpoints/partial*"))


def test_the_run_was_copied_at_every_kind_of_point(copies):
    # Each of 7 saves writes, renames and drops files; each of 6 steps and 3 evaluations is a row.
    assert {"write", "fsync", "replace", "rename", "unlink", "rmdir"} <= {
        name for name, _ in copies
    }
    assert len(copies) > 100


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_a_run_killed_at_a_random_point_goes_on(tmp_path, dataset, copies, untouched, sample):
    first, last = (len(copies) * n // SAMPLES for n in (sample, sample + 1))
    _, copy = copies[random.Random(sample).randrange(first, last)]
    go_on(copy, tmp_path, dataset, untouched)


def test_a_run_killed_between_commit_and_its_row_goes_on(tmp_path, dataset, copies, untouched):
    """The checkpoint has its name; the row that tells of it is not written."""
    copy = next(path for _, path in copies if (path / COMMIT_OF_3).exists())
    told = [r["step"] for r in read_rows(copy / "metrics.jsonl") if r.get("event") == "checkpoint"]
    assert told == [0, 1, 2]
    go_on(copy, tmp_path, dataset, untouched)
