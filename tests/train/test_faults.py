# SPDX-License-Identifier: Apache-2.0
"""Protects a run against what happens to machines: each fault is injected, then the run goes on.

Wanted each time: nothing already saved is lost, the next session continues from the last good
state, metrics.jsonl says what happened, and the folder is SUCCESS or FAILED as it should be. Oracle
of the numbers: the run without the fault, bit for bit. (SIGKILL, SIGTERM: test_real_model.py.)
"""

import errno
import resource
import shutil
import signal
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from tiny_runs import EVERY_STEP, Faulty, make_config, numbers, open_run

from atomic_lib.data import open_token_folder
from atomic_lib.evidence import verify
from atomic_lib.train import NonFiniteError, TrainingInterrupted, program, train
from atomic_lib.train.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("tiny_model")
Usage = namedtuple("Usage", "total used free")


def events(run, name):
    return [row for row in run.metrics.rows() if row.get("event") == name]


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: truncate(largest_file(step / "state")), "bytes instead of"),
        (lambda step: flip_a_bit(largest_file(step / "state")), "does not have its sha256"),
        (lambda step: largest_file(step / "state").unlink(), "is missing"),
        (lambda step: (step / "commit.json").unlink(), "never committed"),
        (lambda step: truncate(step / "commit.json"), "cannot be read"),
    ],
    ids=["truncated", "bit-flipped", "file-missing", "uncommitted", "commit-torn"],
)
def test_a_damaged_checkpoint_is_passed_over(broken, dataset, whole, damage, said):
    damage(broken / "checkpoints" / "step_00000006")
    config = make_config(**EVERY_STEP)
    run = open_run(broken, config)
    result = train(run, config, dataset)
    assert result.resumed_from_step == 5
    (event,) = events(run, "checkpoint_rejected")
    assert event["path"] == "step_00000006"
    assert said in event["problem"]
    assert numbers(broken) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(broken) == []


def test_a_torn_last_row_is_cut_and_said(broken, dataset, whole):
    log = broken / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-40])
    config = make_config(**EVERY_STEP)
    run = open_run(broken, config)
    result = train(run, config, dataset)
    assert len(events(run, "repaired")) == 1
    assert numbers(broken) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(broken) == []


def test_a_full_disk_on_the_way_costs_a_checkpoint_and_no_step(
    tmp_path, dataset, whole, monkeypatch
):
    calls = iter(range(100))
    real = shutil.disk_usage

    def disk_usage(path):
        return Usage(1, 1, 0) if next(calls) in (3, 4) else real(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    config = make_config(**EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    result = train(run, config, dataset)
    assert len(events(run, "checkpoint_failed")) == 2
    assert "are free" in events(run, "checkpoint_failed")[0]["reason"]
    assert numbers(run.path) == numbers(whole)
    run.succeed(**result.summary())
    assert verify(run.path) == []


def test_a_write_that_the_system_refuses_leaves_the_last_checkpoint(tmp_path, dataset):
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(200, 200)))}
    store = CheckpointStore(folder=tmp_path / "checkpoints", config={})
    store.save(state, step=1, facts={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system lets no file grow beyond 20 kB; the array has 160 kB.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            store.save(state, step=2, facts={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert store.newest_valid().step == 1


def test_a_full_disk_at_the_end_fails_the_run(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    config = make_config()
    run = open_run(tmp_path / "run", config)
    with pytest.raises(OSError, match="checkpoint needs"):
        train(run, config, dataset)
    assert verify(run.path)[0].startswith("FAILED.json: the run failed: OSError: checkpoint needs")


def test_a_token_file_that_shrinks_stops_the_run_and_a_restored_one_resumes(
    broken, tmp_path, token_folder, whole
):
    folder = shutil.copytree(token_folder, tmp_path / "tokens")
    dataset = open_token_folder(folder, vocab_size=tiny.VOCABULARY)
    file = folder / "train.bin"
    data = file.read_bytes()
    config = make_config(**EVERY_STEP)
    file.write_bytes(data[:400])
    with pytest.raises(RuntimeError, match=r"train\.bin"):
        train(open_run(broken, config), config, dataset)
    file.write_bytes(data)
    restored = open_token_folder(folder, vocab_size=tiny.VOCABULARY)
    result = train(open_run(broken, config), config, restored)
    assert result.resumed_from_step == 6
    assert numbers(broken) == numbers(whole)


def test_a_read_only_data_folder_is_enough(tmp_path, token_folder, whole):
    folder = shutil.copytree(token_folder, tmp_path / "tokens")
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    config = make_config()
    train(
        open_run(tmp_path / "run", config),
        config,
        open_token_folder(folder, vocab_size=tiny.VOCABULARY),
    )
    assert numbers(tmp_path / "run") == numbers(whole)


class Poisoned:
    """A dataset in whose batches of some steps one sequence starts with the id that means NaN."""

    POISON = tiny.VOCABULARY - 1  # an id that the token files do not hold

    def __init__(self, dataset, steps):
        self._dataset, self._steps = dataset, steps

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def train_batch(self, seed, step, **sizes):
        tokens = self._dataset.train_batch(seed, step, **sizes).copy()
        if step in self._steps:
            tokens[1, 0] = self.POISON
        return tokens


@pytest.fixture
def poisonable(tiny_model, monkeypatch):
    def forward(params, tokens, keys):
        hidden, embedding, gates = tiny.tiny_forward(params, tokens, keys)
        bad = tokens[:, :1, None] == Poisoned.POISON
        return jnp.where(bad, jnp.nan, hidden), embedding, gates

    monkeypatch.setattr(program, "model_forward", lambda *arguments: forward)


@pytest.mark.usefixtures("poisonable")
def test_a_non_finite_step_is_skipped_counted_and_placed(tmp_path, dataset):
    config = make_config(keep_checkpoints=20, **EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    result = train(run, config, Poisoned(dataset, {4, 8}))
    assert result.skipped_steps == 2
    rows = {row["step"]: row for row in run.metrics.rows() if row["kind"] == "train"}
    assert [step for step, row in rows.items() if not row["finite"]] == [5, 9]
    assert rows[5]["loss"] is None
    assert rows[5]["nonfinite"] is True
    assert [rows[step]["skipped"] for step in (4, 5, 8, 9, 12)] == [0, 1, 1, 2, 2]
    first, _ = events(run, "skipped")
    wanted = dataset.train_windows(config.data_seed, 4, batch_size=4, sequence_length=tiny.LENGTH)
    assert first["windows"] == wanted.tolist()
    # Untouched: parameters and optimiser before and after step 5 have the same files.
    before, after = (
        stored_bytes(run.path / "checkpoints" / f"step_0000000{step}") for step in (4, 5)
    )
    assert before["params"] == after["params"]
    assert before["optimizer"] == after["optimizer"]
    run.succeed(**result.summary())
    assert verify(run.path) == []


def stored_bytes(path):
    state = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path / "state")
    return {
        key: {
            jax.tree_util.keystr(place): np.asarray(leaf).tobytes()
            for place, leaf in jax.tree_util.tree_leaves_with_path(state[key])
        }
        for key in ("params", "optimizer")
    }


@pytest.mark.usefixtures("poisonable")
def test_too_many_non_finite_steps_in_a_row_fail_the_run(tmp_path, dataset):
    config = make_config(max_skipped_in_a_row=3, **EVERY_STEP)
    run = open_run(tmp_path / "run", config)
    with pytest.raises(NonFiniteError, match="3 steps in a row, the last one 8"):
        train(run, config, Poisoned(dataset, {3, 5, 6, 7}))
    assert "NonFiniteError" in verify(run.path)[0]
    assert (run.path / "checkpoints" / "step_00000007" / "commit.json").is_file()


class Interrupting(Faulty):
    def train_batch(self, seed, step, **sizes):
        if step == self._step:
            signal.raise_signal(signal.SIGINT)
        return self._dataset.train_batch(seed, step, **sizes)


def test_an_interrupt_saves_first_and_leaves_the_handlers_as_they_were(tmp_path, dataset, whole):
    before = signal.getsignal(signal.SIGINT)
    config = make_config()
    run = open_run(tmp_path / "run", config)
    with pytest.raises(TrainingInterrupted, match="SIGINT stopped training at step 6"):
        train(run, config, Interrupting(dataset, 6))
    assert signal.getsignal(signal.SIGINT) is before
    result = train(open_run(tmp_path / "run", config), config, dataset)
    assert result.resumed_from_step == 6
    assert numbers(tmp_path / "run") == numbers(whole)


class InterruptedEvaluation(Faulty):
    """A dataset during whose second evaluation SIGINT arrives."""

    evaluations = 0

    def validation_batches(self, *sizes, **limits):
        self.evaluations += 1
        for batch in self._dataset.validation_batches(*sizes, **limits):
            if self.evaluations == 2:
                signal.raise_signal(signal.SIGINT)
            yield batch


def test_an_interrupt_does_not_wait_for_the_evaluation(tmp_path, dataset, whole):
    config = make_config()
    run = open_run(tmp_path / "run", config)
    with pytest.raises(TrainingInterrupted, match="SIGINT stopped training at step 5"):
        train(run, config, InterruptedEvaluation(dataset, None))
    assert [row["step"] for row in run.metrics.rows() if row["kind"] == "eval"] == [0]
    result = train(open_run(tmp_path / "run", config), config, dataset)
    assert result.resumed_from_step == 5
    assert numbers(tmp_path / "run") == numbers(whole)
