# SPDX-License-Identifier: Apache-2.0
"""A run small enough to be trained, killed and resumed many times: the model of `tiny`."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import tiny

from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder, effective_rows, read_rows
from atomic_lib.train import checkpoint, program, session

SETTINGS = {
    "run": "tiny",
    "preset": "atomic-hybrid-smoke",
    "model": {"vocab_size": tiny.VOCABULARY, "hidden_size": tiny.WIDTH},
    "corpus": "tokens",
    "sequence_length": tiny.LENGTH,
    "batch_size": 4,
    "schedule_unit": "steps",
    "warmup_steps": 3,
    "max_steps": 12,
    "learning_rate": 0.01,
    "eval_every": 5,
    "checkpoint_seconds": 1e9,
    "budget_seconds": None,
    "dropout_rate": 0.25,
    "trackers": (),
}
EVERY_STEP = {"checkpoint_seconds": 1e-9}
# What a program is made of: runs that agree in these share one, and do not compile again.
COMPILED_IN = (
    "preset", "optimizer", "weight_decay", "decay_groups", "clip_norm", "adam_b1", "adam_b2",
    "compute_dtype", "accumulate_steps", "loss_chunks", "dropout_rate", "dropout_seed",
    "data_parallel", "fsdp", "batch_size", "sequence_length", "init_seed", "document_separator",
)  # fmt: skip
REPEATED = ("step", "tokens", "loss", "lr", "grad_norm", "finite", "elapsed_fraction", "ce")


def write_tokens(folder: Path, *, tokens: int = 2000) -> Path:
    """Writes train.bin and val.bin of random ids, in which each id prefers its successor."""
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.bin", tokens), ("val.bin", 400)):
        ids = rng.integers(0, tiny.VOCABULARY - 1, size=count)
        for place in range(1, count):
            if rng.random() < 0.8:
                ids[place] = (ids[place - 1] + 1) % (tiny.VOCABULARY - 1)
        ids.astype("<u2").tofile(folder / name)
    return folder


def open_run(path: Path, config: TrainConfig) -> RunFolder:
    """Opens a run folder as a notebook does."""
    values = dataclasses.asdict(config)
    return RunFolder.open(
        path,
        notebook="train_hybrid",
        parameters=values,
        origins=dict.fromkeys(values, "file"),
        root=path.parent,
    )


def make_config(**changes) -> TrainConfig:
    """The tiny run's configuration with some fields replaced."""
    return TrainConfig(**{**SETTINGS, **changes})


def numbers(run_path: Path) -> list[dict]:
    """The rows that count, without clocks: what must be the same in a resumed run."""
    rows = effective_rows(read_rows(run_path / "metrics.jsonl"))
    kept = [row for row in rows if row["kind"] in ("train", "eval")]
    return [{name: row[name] for name in REPEATED if name in row} for row in kept]


def last_state(run_path: Path, config: TrainConfig, dataset) -> dict[str, tuple]:
    """Every array of the newest checkpoint by its path: dtype, shape and bytes."""
    settings = program.resume_config(config, dataset.manifest)
    store = checkpoint.CheckpointStore(folder=run_path / "checkpoints", config=settings)
    state = store.newest_valid().restore(session.build_program(config).abstract_state)
    return {
        jax.tree_util.keystr(path): (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


class PulledPlug(BaseException):
    """Stands for a process that ends between two instructions."""


class Faulty:
    """A dataset that raises when the batch of one step is read."""

    def __init__(self, dataset, step):
        self._dataset, self._step = dataset, step

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def train_batch(self, seed, step, **sizes):
        if step == self._step:
            raise PulledPlug(f"at step {step}")
        return self._dataset.train_batch(seed, step, **sizes)
