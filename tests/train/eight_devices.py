# SPDX-License-Identifier: Apache-2.0
"""Runs three training steps on every mesh of 1 and 8 devices and prints what came out, as JSON.

A process of its own, because the number of fake devices is fixed when jax starts.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny_forward, tiny_params, tiny_tokens

from atomic_lib.train.optimizer import Optimizer
from atomic_lib.train.sharding import Placement
from atomic_lib.train.step import TrainStep, initial_state, make_eval_step

MESHES = {"1x1": (1, 1, 1), "8x1": (8, 1, 1), "1x8": (1, 8, 1), "2x4": (2, 4, 2), "4x2": (4, 2, 1)}

SEPARATOR = 7
COUNTED_ROWS = 13  # of the 16 that the evaluation is given


def documents(seed: int) -> np.ndarray:
    """Tokens of packed documents, far more of them in the first rows than in the last."""
    tokens = tiny_tokens(seed)
    tokens[:3, ::2] = SEPARATOR
    return tokens


def run(data: int, fsdp: int, accumulate: int) -> dict:
    """Losses, scaled first gradients and last parameters on one mesh, as nested lists."""
    placement = Placement.over(data_parallel=data, fsdp=fsdp)
    optimizer = Optimizer(
        kind="muon_adamw",
        weight_decay=0.1,
        clip_norm=1.0,
        placement=placement,
    )
    program = TrainStep(
        forward=tiny_forward,
        optimizer=optimizer,
        placement=placement,
        accumulate_steps=accumulate,
        loss_chunks=3,
        dropout_seed=5,
        document_separator=SEPARATOR,
    )
    state = initial_state(tiny_params(), optimizer)
    state = jax.device_put(state, placement.of(state))
    gates = []
    shards = {n: str(p.sharding.spec) for n, p in state.params.items()}
    step, losses, gradients = program.compiled(), [], {}
    for number in range(3):
        tokens = placement.place_batch(documents(number))
        state, metrics = step(state, tokens, jnp.float32(1e-2))
        losses.append(float(metrics["loss"]))
        gates.append([np.asarray(part).tolist() for part in metrics["gates"]])
        if number == 0:  # the first moments now are the clipped gradient times 0.05 or 0.1
            moments = state.optimizer["muon"]["momentum"] | state.optimizer["adam"]["mu"]
            gradients = {name: np.asarray(value).tolist() for name, value in moments.items()}
    first = placement.place_batch(documents(0))
    sums = make_eval_step(tiny_forward, placement, 4, SEPARATOR)(
        state.params, first, jnp.arange(48, dtype=jnp.int32), COUNTED_ROWS
    )
    return {
        "losses": losses,
        "gates": gates,
        "gradients": gradients,
        "params": {name: np.asarray(value).tolist() for name, value in state.params.items()},
        "shards": shards,
        "sums": {name: np.asarray(value).tolist() for name, value in sums.items()},
    }


if __name__ == "__main__":
    assert jax.device_count() == 8
    json.dump({name: run(*mesh) for name, mesh in MESHES.items()}, sys.stdout)
