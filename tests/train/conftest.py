# SPDX-License-Identifier: Apache-2.0
"""A run small enough to be trained, killed and resumed many times: the model of `tiny`."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from atomic_lib.config import TrainConfig
from atomic_lib.data import open_token_folder
from atomic_lib.evidence import RunFolder
from atomic_lib.train import program

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
}


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


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiles each program once: these tests start many sessions of the same few runs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax_cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def tiny_model(monkeypatch):
    """Puts the model of `tiny` in the place of the language model."""
    monkeypatch.setattr(program, "model_forward", lambda config, platform: tiny.tiny_forward)
    monkeypatch.setattr(
        program, "init_parameters", lambda config, seed: tiny.tiny_params(int(seed))
    )


@pytest.fixture
def make_config():
    """Builds the tiny run's configuration with some fields replaced."""
    return lambda **changes: TrainConfig(**{**SETTINGS, **changes})


@pytest.fixture
def dataset(tmp_path):
    return open_token_folder(write_tokens(tmp_path / "tokens"), vocab_size=tiny.VOCABULARY)
