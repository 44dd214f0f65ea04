# SPDX-License-Identifier: Apache-2.0
"""A model small enough to think about: a tied embedding and one hidden layer, with dropout.

It stands for `LanguageModel` where a test is about the step and not about the model.
"""

import jax
import jax.numpy as jnp
import numpy as np

from atomic_lib.model.gate_statistics import GateStatistics

VOCABULARY, WIDTH = 48, 16
BATCH, LENGTH = 16, 12
DROPOUT = 0.25


def tiny_params(seed=0):
    """Float32 arrays by name, as the real model names them."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding/table": (VOCABULARY, WIDTH),
        "block_0/ffn/up/kernel": (WIDTH, 3 * WIDTH),
        "block_0/ffn/down/kernel": (3 * WIDTH, WIDTH),
        "final_norm/scale": (WIDTH,),
    }
    params = {n: rng.normal(size=s, scale=0.3).astype(np.float32) for n, s in shapes.items()}
    params["final_norm/scale"] += 1.0
    return {name: jnp.asarray(value) for name, value in params.items()}


def tiny_tokens(seed=0, batch=BATCH):
    """Random tokens [batch, LENGTH + 1] int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, size=(batch, LENGTH + 1)).astype(np.int32)


def tiny_gates(tokens):
    """What stands for the gates of two mixers: shares of tokens [B, T], and their largest id."""

    def share(condition):
        return jnp.stack([jnp.mean(condition, dtype=jnp.float32), jnp.float32(0.5)])

    largest = tokens.max().astype(jnp.float32)
    return GateStatistics(
        erase_low=share(tokens < 5),
        erase_high=share(tokens > 40),
        write_low=share(tokens < 10),
        write_high=share(tokens > 30),
        decay_min=jnp.stack([jnp.float32(-1.0), -largest]),
    )


def tiny_forward(params, tokens, dropout_keys):
    """Hidden states [B, T, D], the output embedding, gates; drops hidden units row by row."""
    x = params["embedding/table"][tokens]
    y = jnp.tanh(x @ params["block_0/ffn/up/kernel"])
    if dropout_keys is not None:
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - DROPOUT, y.shape[1:]))
        y = jnp.where(draw(dropout_keys), y / (1 - DROPOUT), 0.0)
    hidden = (x + y @ params["block_0/ffn/down/kernel"]) * params["final_norm/scale"]
    return hidden, params["embedding/table"], tiny_gates(tokens)
