# SPDX-License-Identifier: Apache-2.0
"""Protects that a run by wall clock can be repeated from its record, and that its audit is true.

Oracle of exactness: the recorded run itself, which died once and was resumed, under a clock that
moves unevenly; the replay is one session on the machine's own clock, and every number and the last
checkpoint's arrays must have the same bits. Oracle of the audit: records that the test changes in
one number, so it knows the one difference.
"""

import json

import pytest
from tiny_runs import EVERY_STEP, Faulty, PulledPlug, last_state, make_config, numbers, open_run

from atomic_lib.evidence import RunFolder, verify
from atomic_lib.train import train
from atomic_lib.train.replay import Replay

pytestmark = pytest.mark.usefixtures("tiny_model")
TIMED = {"schedule_unit": "time", "budget_seconds": 40.0, "max_steps": None, "eval_every": 4}


class UnevenClock:
    """A clock that moves whenever it is read, by a time that depends on how often it was."""

    def __init__(self):
        self.now, self.reads = 100.0, 0

    def __call__(self):
        self.reads += 1
        self.now += 0.05 + 0.01 * (self.reads * self.reads % 7)
        return self.now


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, dataset, tiny_model) -> RunFolder:
    """A finished run by wall clock that died at step 5 and was resumed."""
    config = make_config(**TIMED, **EVERY_STEP)
    path = tmp_path_factory.mktemp("recorded") / "run"
    with pytest.raises(PulledPlug):
        train(open_run(path, config), config, Faulty(dataset, 5), clock=UnevenClock())
    run = open_run(path, config)
    result = train(run, config, dataset, clock=UnevenClock())
    assert result.stop_reason == "time"
    assert result.step > result.resumed_from_step == 4
    run.succeed(**result.summary())
    assert verify(path) == []
    return run


def test_a_replay_repeats_a_wall_clock_run_bit_for_bit(tmp_path, dataset, recorded):
    config = make_config(**TIMED, replay=str(recorded.path))
    run = open_run(tmp_path / "replay", config)
    result = train(run, config, dataset)
    assert result.stop_reason == "completed"
    assert numbers(run.path) == numbers(recorded.path)
    wanted = last_state(recorded.path, config, dataset)
    found = last_state(run.path, config, dataset)
    assert found == wanted
    run.succeed(**result.summary())
    assert verify(run.path) == []
    audit = json.loads((run.path / "replay.json").read_text())
    assert (audit["bit_exact"], audit["differences"], audit["source"]) == (True, 0, "run")
    assert audit["rows"] == len(numbers(recorded.path))
    assert (audit["first_step"], audit["last_step"]) == (1, result.step)
    assert json.loads((run.path / "SUCCESS.json").read_text())["results"]["replay"] == audit


def test_a_replay_may_begin_at_the_recorded_runs_checkpoint(tmp_path, dataset, recorded):
    """The audit of a long run: its last steps only, on any machine."""
    config = make_config(**TIMED, replay=str(recorded.path), resume_from=(str(recorded.path),))
    steps = sorted(int(p.name[-8:]) for p in (recorded.path / "checkpoints").glob("step_*"))
    run = open_run(tmp_path / "replay", config)
    result = train(run, config, dataset)
    # Not the last one: nothing would be left to repeat.
    assert result.resumed_from_step == steps[-2] < result.step == steps[-1]
    assert result.replay["first_step"] == result.resumed_from_step + 1
    assert result.replay["bit_exact"] is True


def test_the_audit_finds_what_differs(recorded):
    rows = [dict(row) for row in recorded.metrics.rows()]
    (changed,) = (row for row in rows if row["kind"] == "train" and row["step"] == 6)
    loss = changed["loss"]
    changed["loss"] = loss * (1 + 2**-20)
    audit = Replay.of(recorded.path / "metrics.jsonl").compare(rows)
    assert audit["bit_exact"] is False
    assert audit["differences"] == 1
    assert audit["first_difference"] == {
        "kind": "train", "step": 6, "field": "loss", "recorded": loss, "replayed": changed["loss"],
    }  # fmt: skip
    assert audit["largest_relative_difference"]["loss"] == pytest.approx(2**-20, rel=1e-3)


def test_nothing_compared_is_not_called_exact(recorded):
    assert Replay.of(recorded.path).compare([])["bit_exact"] is False


def test_a_record_that_is_not_there_is_refused_with_the_places(tmp_path, dataset):
    config = make_config(replay="nowhere")
    run = open_run(tmp_path / "run", config)
    with pytest.raises(FileNotFoundError, match=f"replay: 'nowhere' .* {tmp_path / 'nowhere'}"):
        train(run, config, dataset)
    assert "replay: 'nowhere'" in verify(run.path)[0]
