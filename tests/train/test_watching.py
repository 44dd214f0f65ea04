# SPDX-License-Identifier: Apache-2.0
"""Protects what a run says of itself: saturation, clipping, heartbeat, profile, failed trackers.

Oracle of the counters: numpy on the batches that the dataset gives for each step (the tiny model's
"gates" are its tokens). Oracle of "hurts nothing": the numbers of the run that nobody watches.
"""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_runs import make_config, numbers, open_run

from atomic_lib.evidence import verify
from atomic_lib.model.gate_statistics import GateStatistics
from atomic_lib.train import train
from atomic_lib.train.budget import Budget
from atomic_lib.train.heartbeat import Heartbeat
from atomic_lib.train.optimizer import Optimizer
from atomic_lib.train.sharding import Placement
from atomic_lib.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("tiny_model")


CLIP = 1.15  # some of the tiny run's gradients are above it, some below


def refuse(**settings):
    raise ConnectionError("no network")


@pytest.fixture(scope="module")
def watched(tmp_path_factory, dataset, tiny_model):
    """A finished run with every kind of watching, one tracker of which fails."""
    config = make_config(
        trackers=("tensorboard", "wandb"),
        profile_steps=(4, 5),
        clip_norm=CLIP,
        budget_seconds=600.0,
    )
    run = open_run(tmp_path_factory.mktemp("watched") / "run", config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
        result = train(run, config, dataset)
    run.succeed(**result.summary())
    return run, config


def rows_of(run, kind):
    return [row for row in run.metrics.rows() if row["kind"] == kind]


def test_rows_count_saturated_gates_over_the_whole_batch(watched, dataset):
    run, config = watched
    for row in rows_of(run, "train"):
        batch = dataset.train_batch(
            config.data_seed, row["step"] - 1, batch_size=4, sequence_length=tiny.LENGTH
        )[:, :-1]
        wanted = {
            "erase_low": ((batch < 5).mean() + 0.5) / 2,
            "erase_high": ((batch > 40).mean() + 0.5) / 2,
            "write_low": ((batch < 10).mean() + 0.5) / 2,
            "write_high": ((batch > 30).mean() + 0.5) / 2,
            "decay_min": -float(batch.max()),
        }
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-6), row["step"]


def test_each_evaluation_tells_the_gates_of_every_mixer(watched):
    run, config = watched
    rows = rows_of(run, "train")
    events = [row for row in rows_of(run, "event") if row["event"] == "gates"]
    assert [event["step"] for event in events] == [5, 10, 12]
    for event in events:
        row = rows[event["step"] - 1]
        assert event["mixers"] == list(config.model_config.gated_mixers)
        assert event["decay_min"] == [-1.0, row["decay_min"]]
        assert np.mean(event["erase_low"]) == pytest.approx(row["erase_low"], rel=1e-6)


def test_clip_rate_is_the_share_of_clipped_steps_so_far(watched):
    run, config = watched
    clipped = [row["grad_norm"] > config.clip_norm for row in rows_of(run, "train")]
    assert 0 < sum(clipped) < len(clipped), "this run shows nothing: choose another clip_norm"
    for row in rows_of(run, "train"):
        assert row["clipped"] == clipped[row["step"] - 1]
        assert row["clip_rate"] == sum(clipped[: row["step"]]) / row["step"]


ROW = {"step": 300, "loss": 3.25, "tok_per_s": 410_000.0, "mfu": 0.31, "hbm": 9 << 30}
# 100 s of the budget's clock are used; a step takes 0.5 s, an evaluation 20 s each 100 steps, a
# checkpoint 10 s each 100 s: 0.7 s a step in nine tenths of the time. 1.5 x 50 s are in reserve.
LEFT = {"budget_left_s": 10_000 - 100 - 75, "target_left_s": 700 * 0.7 / 0.9}


@pytest.mark.parametrize(
    ("target", "budget_seconds", "ends"),
    [
        (1000, 10_000.0, "9 min 04 s to step 1,000, 2 h 43 min of budget left"),
        (None, 10_000.0, "9.0 GiB, 2 h 43 min of budget left"),
        (1000, None, "9.0 GiB, 9 min 04 s to step 1,000"),
    ],
)
def test_the_heartbeat_says_where_the_run_is(tmp_path, target, budget_seconds, ends):
    run = open_run(tmp_path / "run", make_config())
    budget = Budget(
        clock=lambda: 100.0, started_at=0.0, budget_seconds=budget_seconds, eval_every=100,
        checkpoint_every_seconds=100.0, evaluation_seconds=20.0, checkpoint_seconds=10.0,
    )  # fmt: skip
    budget.record_step(0.5)
    Heartbeat(run, target=target, clock=lambda: 0.0).tell(ROW, budget)
    beat = json.loads((run.path / "heartbeat.json").read_text())
    assert {name: beat[name] for name in ROW} == ROW
    assert beat["target_step"] == target
    assert beat["budget_left_s"] == (LEFT["budget_left_s"] if budget_seconds else None)
    assert beat["target_left_s"] == (pytest.approx(LEFT["target_left_s"]) if target else None)
    assert beat["text"].startswith("step 300")
    assert "loss 3.2500, 410,000 tokens/s, MFU 31.0%, 9.0 GiB" in beat["text"]
    assert beat["text"].endswith(ends)


def test_the_trace_is_written_and_told(watched):
    run, _ = watched
    told = [(r["step"], r["active"]) for r in rows_of(run, "event") if r["event"] == "profile"]
    assert told == [(3, True), (5, False)]
    assert list((run.path / "watch" / "profile").rglob("*.xplane.pb"))


def test_a_failed_tracker_is_told_once_and_the_run_succeeds(watched):
    run, _ = watched
    told = [row for row in rows_of(run, "event") if row["event"] == "tracker_failed"]
    assert [(row["tracker"], row["reason"]) for row in told] == [
        ("wandb", "ConnectionError: no network")
    ]
    assert list((run.path / "watch" / "tensorboard").glob("events.*"))
    assert verify(run.path) == []
    listed = (run.path / "SHA256SUMS").read_text()
    assert "watch/" not in listed, "views of the record are no evidence"


def test_watching_changes_no_number(tmp_path, dataset, watched):
    config = make_config(clip_norm=CLIP, budget_seconds=600.0)
    run = open_run(tmp_path / "run", config)
    train(run, config, dataset)
    assert numbers(run.path) == numbers(watched[0].path)


def test_a_profiler_that_fails_stops_nothing(tmp_path, dataset, monkeypatch):
    def refuse(folder):
        raise RuntimeError("no profiler on this device")

    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    config = make_config(clip_norm=CLIP, profile_steps=(2, 3))
    run = open_run(tmp_path / "run", config)
    assert train(run, config, dataset).step == 12
    (event,) = (row for row in rows_of(run, "event") if row["event"].startswith("profile"))
    assert (event["event"], event["step"]) == ("profile_failed", 1)


def test_one_device_keeps_accumulated_gradients_in_full(tmp_path):
    """Only what travels between devices is rounded to the compute dtype."""
    placement = Placement.over(data_parallel=1, fsdp=1)
    optimizer = Optimizer(kind="adamw", weight_decay=0.1, clip_norm=1.0)
    program = TrainStep(
        forward=tiny.tiny_forward, optimizer=optimizer, placement=placement,
        accumulate_steps=4, matrix_dtype="bfloat16",
    )  # fmt: skip
    _, gradients, gates = jax.jit(program.loss_and_gradients)(
        tiny.tiny_params(), jnp.asarray(tiny.tiny_tokens()), jnp.int32(0)
    )
    matrix = np.asarray(gradients["block_0/ffn/up/kernel"])
    assert matrix.dtype == np.float32
    rounded = matrix.astype(jnp.bfloat16).astype(np.float32)
    assert np.mean(matrix != rounded) > 0.5
    assert isinstance(gates, GateStatistics)
