# SPDX-License-Identifier: Apache-2.0
"""Protects the ablations of the hybrid: one parameter file each, which changes one thing, trains.

Oracles: seed1's configuration, with which every other value must be equal; parameter counts worked
out by hand from the equations of the parts; the loss of a fixed batch, which the training step must
lower. Trained at smoke size, and what no ablation is about is left out so that seven programs
compile in seconds: three of a block's mixers (where they are the ablation, the second block), Muon,
most of the vocabulary.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atomic_lib.config import TrainConfig, load_config
from atomic_lib.train.program import build_program

ROOT = Path(__file__).resolve().parents[2]
HYBRID = 307_131_392
WIDTH, BLOCKS, SITES = 1024, 7, 34
MLA, GDN2 = 53 * WIDTH**2 // 16, 7 * WIDTH**2  # parameters of a mixer
# What each file changes, and the parameters that this leaves.
ABLATIONS = {
    "routing_none": ({"routing": "none"}, HYBRID - 2 * SITES * WIDTH),
    "routing_flat": ({"routing": "flat"}, HYBRID),
    # The first block has no earlier one: five sites fewer than sublayers, four fewer than H-DAR.
    "routing_block": ({"routing": "block"}, HYBRID - 2 * 4 * WIDTH),
    "read_replacement": ({"routing_read": "replacement"}, HYBRID),
    "summary_mixers": ({"routing_summary_ffn": False}, HYBRID),
    "slot_gdn2": ({"block": ("gdn2",) * 4}, HYBRID + BLOCKS * (GDN2 - MLA)),
    "norm_r": ({"norm_family": "R"}, HYBRID),
}
STEPS, BATCH, LENGTH = 4, 2, 16
LEAN_MODEL = {"vocab_size": 48, "block": ("mla",)}


def load(run: str) -> TrainConfig:
    config = load_config("train_hybrid", {"run": run}, root=ROOT).config
    assert isinstance(config, TrainConfig)
    return config


def test_every_ablation_file_is_tested():
    files = {path.stem for path in (ROOT / "params" / "train_hybrid").glob("ablate_*.yaml")}
    assert files == {f"ablate_{name}" for name in ABLATIONS}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_seed_1_but_for_one_thing(name):
    changes, parameters = ABLATIONS[name]
    found, seed1 = load(f"ablate_{name}"), load("seed1")
    assert dataclasses.replace(found, run="seed1", model={}) == seed1
    assert found.model_config == dataclasses.replace(seed1.model_config, **changes)
    assert found.model_config.parameter_count == parameters


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_trains_at_smoke_size(name):
    file = load(f"ablate_{name}")
    lean = LEAN_MODEL if "block" not in file.model else {**LEAN_MODEL, "num_blocks": 1}
    config = dataclasses.replace(
        file, preset="atomic-hybrid-smoke", model={**lean, **file.model},
        optimizer="adamw", batch_size=BATCH, sequence_length=LENGTH, kernel_backend="reference",
        compute_dtype="float32", fsdp=1,
    )  # fmt: skip
    program = build_program(config, devices=jax.devices()[:1])
    rows = np.random.default_rng(0).integers(48, size=(BATCH, LENGTH + 1), dtype=np.int32)
    batch = program.placement.place_batch(rows)
    state, losses = program.start(), []
    for _ in range(STEPS):
        state, metrics = program.step(state, batch, jnp.float32(0.01))
        assert bool(metrics["finite"])
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < losses[0] - 0.1
