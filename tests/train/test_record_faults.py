# SPDX-License-Identifier: Apache-2.0
"""Protects the record of a run against disks, signals and hands, and the run against its record.

Wanted each time: what had been written stays, the folder says what happened, and the next session
ends as the run that nothing happened to (the oracle), bit for bit.
"""

import errno
import json
import os
import shutil
import signal

import pytest
from tiny_runs import EVERY_STEP, Faulty, PulledPlug, make_config, numbers, open_run

from atomic_lib.evidence import metrics_log, read_rows, run_folder, verify
from atomic_lib.train import TrainingInterrupted, train
from atomic_lib.train.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("tiny_model")
FULL = OSError(errno.ENOSPC, "No space left on device")


def events(path, name):
    return [row for row in read_rows(path / "metrics.jsonl") if row.get("event") == name]


def finish(path, config, dataset, whole):
    """Goes on to the end; the numbers must be the untouched run's and the folder verify."""
    run = open_run(path, config)
    result = train(run, config, dataset)
    assert numbers(path) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(path) == []
    return result


def test_a_disk_that_refuses_a_row_fails_the_run_and_loses_no_other(
    tmp_path, dataset, whole, monkeypatch
):
    real, calls = os.write, iter(range(1000))

    def write(descriptor, data):
        if next(calls) >= 16:  # half of this row is written, as a disk that fills up does it
            real(descriptor, data[: len(data) // 2])
            raise FULL
        return real(descriptor, data)

    config = make_config(**EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    monkeypatch.setattr(metrics_log.os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        train(run, config, dataset)
    monkeypatch.undo()
    assert verify(run.path)[0].startswith("FAILED.json: the run failed: OSError: [Errno 28]")
    assert len(read_rows(run.path / "metrics.jsonl")) == 16
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"}\n"), "half a row was left"
    assert finish(run.path, config, dataset, whole).resumed_from_step >= 3


def test_the_reason_survives_a_disk_that_refuses_even_failed_json(tmp_path, dataset, monkeypatch):
    config = make_config()
    run = open_run(tmp_path / "run", config)

    def refuse(*arguments, **facts):
        raise FULL

    monkeypatch.setattr(run_folder, "write_failure", refuse)
    with pytest.raises(PulledPlug, match="at step 3") as failed:
        train(run, config, Faulty(dataset, 3))
    assert "FAILED.json could not be written" in failed.value.__notes__[0]
    assert verify(run.path) == ["SUCCESS.json: missing: the run did not finish"]


def test_a_heartbeat_that_cannot_be_written_stops_nothing(tmp_path, dataset, whole):
    config = make_config()
    run = open_run(tmp_path / "run", config)
    (run.path / ".heartbeat.json.tmp").mkdir()  # opening it for writing fails
    result = train(run, config, dataset)
    (run.path / ".heartbeat.json.tmp").rmdir()
    assert numbers(run.path) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(run.path) == []


def test_rows_appended_after_success_are_refused_and_cut_by_the_next_run(tmp_path, dataset, whole):
    path = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    config = make_config()
    finish(path, config, dataset, whole)
    with open(path / "metrics.jsonl", "ab") as log:
        log.write(b'{"kind": "train", "step": 13')
    assert verify(path)[0].startswith("metrics.jsonl: changed")
    finish(path, config, dataset, whole)
    assert len(events(path, "repaired")) == 1


def test_a_forged_row_stops_the_next_run(tmp_path, dataset, whole):
    path = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    last = json.loads((path / "metrics.jsonl").read_bytes().splitlines()[-1])
    with open(path / "metrics.jsonl", "a") as log:
        log.write(json.dumps(last) + "\n")
    config = make_config()
    with pytest.raises(RuntimeError, match="does not carry the sha256 of the line before it"):
        train(open_run(path, config), config, dataset)
    assert "does not carry" in verify(path)[0]


def test_a_lost_log_is_said_and_the_checkpoint_still_used(broken, dataset, whole):
    (broken / "metrics.jsonl").unlink()
    config = make_config(**EVERY_STEP)
    run = open_run(broken, config)
    result = train(run, config, dataset)
    assert result.resumed_from_step == 6
    (event,) = events(broken, "rows_missing")
    assert (event["first"], event["last"]) == (1, 6)
    kept = [row for row in numbers(whole) if row["step"] > 6]
    assert [row for row in numbers(broken) if row["step"] > 6] == kept
    run.succeed(**result.summary())
    assert verify(broken) == []


def test_a_wall_clock_that_runs_back_changes_nothing(tmp_path, dataset, whole, monkeypatch):
    """As after a time server has corrected a machine; durations are from another clock."""
    now = iter(range(10**6, 0, -3600))
    monkeypatch.setattr(run_folder.time, "time", lambda: float(next(now)))
    config = make_config()
    run = open_run(tmp_path / "run", config)
    result = train(run, config, dataset)
    assert numbers(run.path) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(run.path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(
    tmp_path, dataset, whole, monkeypatch, number
):
    real = CheckpointStore._write_state

    def interrupted(self, path, state):
        if int(state.step) == 4:
            signal.raise_signal(number)
        real(self, path, state)

    monkeypatch.setattr(CheckpointStore, "_write_state", interrupted)
    config = make_config(**EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    with pytest.raises(TrainingInterrupted, match=f"{number.name} stopped training at step 5"):
        train(run, config, dataset)
    monkeypatch.undo()
    assert [e["saved_step"] for e in events(run.path, "interrupted")] == [5]
    assert finish(run.path, config, dataset, whole).resumed_from_step == 5


def test_a_signal_with_a_full_disk_says_which_checkpoint_is_left(
    broken, dataset, whole, monkeypatch
):
    def refuse(self, path, state):
        raise FULL

    class Stopping(Faulty):
        def train_batch(self, seed, step, **sizes):
            if step == 8:
                signal.raise_signal(signal.SIGTERM)
            return self._dataset.train_batch(seed, step, **sizes)

    monkeypatch.setattr(CheckpointStore, "_write_state", refuse)
    config = make_config()
    with pytest.raises(
        TrainingInterrupted, match="at step 8; the last checkpoint is that of step 6"
    ):
        train(open_run(broken, config), config, Stopping(dataset, None))
    monkeypatch.undo()
    assert "No space left" in events(broken, "checkpoint_failed")[0]["reason"]
    assert finish(broken, config, dataset, whole).resumed_from_step == 6
