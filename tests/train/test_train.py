# SPDX-License-Identifier: Apache-2.0
"""Protects `train`: what it writes, when it stops, and that a resumed run is the same run.

Oracle of exactness: the uninterrupted run, compared bit for bit (no tolerance): losses, learning
rates, gradient norms, evaluations, parameters and optimiser state. The model is `tiny`, with
dropout; test_real_model.py does the same with the language model and a real SIGKILL.
"""

import itertools
import json
import shutil

import pytest
from tiny_runs import EVERY_STEP, Faulty, PulledPlug, last_state, make_config, numbers, open_run

from atomic_lib.evidence import verify
from atomic_lib.train import ConfigMismatchError, require_improvement, train

pytestmark = pytest.mark.usefixtures("tiny_model")


def test_a_run_leaves_a_record_that_verifies(tmp_path, dataset):
    config = make_config()
    run = open_run(tmp_path / "run", config)
    told = []
    result = train(run, config, dataset, on_progress=lambda rows: told.append(len(rows)))
    assert (result.stop_reason, result.step, result.tokens) == ("max_steps", 12, 12 * 48)
    assert require_improvement(result, minimum=0.1)[1]["step"] == 12
    run.succeed(**result.summary())
    assert verify(run.path) == []

    rows = run.metrics.rows()
    train_rows = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train_rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 5, 10, 12]
    assert all(row["finite"] and row["loss"] > 0 for row in train_rows)
    assert train_rows[0]["lr"] == pytest.approx(0.01 / 3, rel=1e-6)
    assert train_rows[0]["step_ms"] is None, "the first step compiles"
    assert all(row["step_ms"] > 0 for row in train_rows[1:])
    assert told
    beat = json.loads((run.path / "heartbeat.json").read_text())
    assert beat["stage"] == "finished"


@pytest.mark.parametrize("dies_at", [0, 7])
def test_resuming_after_a_pulled_plug_changes_no_bit(tmp_path, dataset, whole, dies_at):
    # A checkpoint before every step. The batch of a step is read while the step before it runs,
    # whose own checkpoint is that of the step before that.
    config = make_config(**EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    with pytest.raises(PulledPlug):
        train(run, config, Faulty(dataset, dies_at))
    assert any("FAILED.json" in problem for problem in verify(run.path))
    run = open_run(tmp_path / "run", config)
    result = train(run, config, dataset)
    assert result.resumed_from_step == max(0, dies_at - 1)
    assert numbers(run.path) == numbers(whole)
    found, wanted = last_state(run.path, config, dataset), last_state(whole, config, dataset)
    assert len(wanted) > 8
    assert found == wanted
    run.succeed(**result.summary())
    assert verify(run.path) == []


def test_a_finished_run_finishes_again_without_a_step(tmp_path, dataset, whole):
    folder = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    # These change no number, so a resumed run may change them.
    free = {"checkpoint_seconds": 5.0, "keep_checkpoints": 1, "budget_seconds": 99.0}
    config = make_config(**free)
    again = train(open_run(folder, config), config, dataset)
    assert (again.step, again.resumed_from_step, again.stop_reason) == (12, 12, "max_steps")
    assert again.first_evaluation["step"] == 0
    assert numbers(folder) == numbers(whole)


def test_an_attached_output_is_continued_with_its_history(tmp_path, dataset, whole):
    config = make_config(resume_from=(str(tmp_path / "attached"),), **EVERY_STEP)
    earlier = open_run(tmp_path / "attached" / "outputs" / "run", config)
    with pytest.raises(PulledPlug):
        train(earlier, make_config(**EVERY_STEP), Faulty(dataset, 7))
    files = sorted((tmp_path / "attached").rglob("*"))

    run = open_run(tmp_path / "new" / "run", config)
    result = train(run, config, dataset)
    assert result.resumed_from_step == 6
    assert result.checkpoint.is_relative_to(run.path)
    assert numbers(run.path) == numbers(whole)
    assert sorted((tmp_path / "attached").rglob("*")) == files, "attached folders are only read"


def test_another_configuration_is_refused_with_the_difference(tmp_path, dataset, whole):
    folder = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    other = make_config(learning_rate=0.02, clip_norm=2.0)
    with pytest.raises(ConfigMismatchError, match=r"clip_norm: 1.0 -> 2.0\n  learning_rate: 0.01"):
        train(open_run(folder, other), other, dataset)
    assert "ConfigMismatchError" in (folder / "FAILED.json").read_text()


class SteppedClock:
    """A clock that moves by a fixed time whenever it is read."""

    def __init__(self, tick):
        self.now, self.tick = 100.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


def test_a_time_budget_stops_the_run(tmp_path, dataset):
    config = make_config(schedule_unit="time", budget_seconds=40.0, max_steps=None, eval_every=100)
    run = open_run(tmp_path / "run", config)
    result = train(run, config, dataset, clock=SteppedClock(0.25), started_at=100.0)
    rows = [row for row in run.metrics.rows() if row["kind"] == "train"]
    assert result.stop_reason == "time"
    assert 3 < result.step == len(rows)
    assert result.elapsed_seconds <= 40.0
    fractions = [row["elapsed_fraction"] for row in rows]
    assert all(a < b for a, b in itertools.pairwise(fractions))
    assert fractions == [row["elapsed_s"] / 40.0 for row in rows]


def test_a_budget_of_time_counts_the_earlier_sessions(tmp_path, dataset):
    config = make_config(schedule_unit="time", budget_seconds=60.0, max_steps=None, eval_every=100)
    config_short = make_config(
        schedule_unit="time", budget_seconds=60.0, max_steps=9, eval_every=100
    )
    run = open_run(tmp_path / "run", config_short)
    first = train(run, config_short, dataset, clock=SteppedClock(0.25), started_at=100.0)
    assert first.stop_reason == "max_steps"
    run = open_run(tmp_path / "run", config)
    second = train(run, config, dataset, clock=SteppedClock(0.25), started_at=100.0)
    assert second.stop_reason == "time"
    assert second.elapsed_seconds <= 60.0
    resumed = next(row for row in run.metrics.rows() if row.get("event") == "resume")
    later = [r for r in run.metrics.rows() if r["kind"] == "train" and r["step"] > 9]
    assert all(row["elapsed_s"] > resumed["elapsed_s"] > 9 for row in later)


def test_a_run_by_tokens_ends_at_its_tokens(tmp_path, dataset):
    config = make_config(schedule_unit="tokens", max_tokens=48 * 7 - 5, max_steps=None)
    result = train(open_run(tmp_path / "run", config), config, dataset)
    assert (result.stop_reason, result.step) == ("max_tokens", 7)
