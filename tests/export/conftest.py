# SPDX-License-Identifier: Apache-2.0
"""A tiny model and a finished training run around it, for the export tests."""

import dataclasses

import jax.numpy as jnp
import pytest

from atomic_lib.evidence import RunFolder
from atomic_lib.model import init_parameters
from atomic_lib.presets import get_preset
from atomic_lib.train.checkpoint import CheckpointStore
from atomic_lib.train.step import TrainState

TINY = {"vocab_size": 80, "hidden_size": 16, "ffn_size": 32, "num_blocks": 1}


@pytest.fixture(scope="session")
def config():
    return dataclasses.replace(get_preset("atomic-hybrid-smoke"), **TINY)


@pytest.fixture(scope="session")
def parameters(config):
    return init_parameters(config, 3)


@pytest.fixture
def outputs(tmp_path, parameters):
    """outputs/ with the finished run train_hybrid-tiny: three steps, one checkpoint."""
    values = {"run": "tiny", "preset": "atomic-hybrid-smoke", "model": TINY, "corpus": "builtin"}
    run = RunFolder.open(
        tmp_path / "train_hybrid-tiny", notebook="train_hybrid", parameters=values,
        origins=dict.fromkeys(values, "file"), root=tmp_path,
    )  # fmt: skip
    run.metrics.start(run_id=run.run_id, tokens_per_step=8)
    run.metrics.append(
        "train", step=3, tokens=24, loss=4.0, lr=1e-3, grad_norm=1.0, finite=True, elapsed_s=1.0
    )
    zero = jnp.zeros((), jnp.int32)
    moments = {name: jnp.ones_like(value) for name, value in parameters.items()}
    state = TrainState(
        step=zero + 3,
        params=parameters,
        optimizer=moments,
        skipped=zero,
        skipped_in_a_row=zero,
        clipped=zero,
    )
    agreed = {"data": {"train": ["1a"], "validation": ["2b"]}}  # what a resume must agree on
    CheckpointStore(folder=run.path / "checkpoints", config=agreed).save(state, step=3, facts={})
    run.succeed("max_steps")
    return tmp_path
