# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.config import ModelConfig
from atomic_lib.model.execution import Execution
from atomic_lib.model.layers import Dense

Array = jax.Array


def dropout(x: Array, *, rate: float, keys: Array) -> Array:
    """Sets each element of x [B, ...] to 0 with probability `rate`, divides the others by 1 - rate.

    keys [B], one a row, so that a row's mask does not depend on the batch that it is in.
    """
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


class FeedForward(nnx.Module):
    """y = (silu(x W_gate) * x W_up) W_down; 3 D F parameters.

    Dropout, where asked for, falls on the product before W_down. The protocol of Atomic-GDN2 names
    a rate but no site; this one is our choice.
    """

    def __init__(self, config: ModelConfig, execution: Execution):
        self.gate = Dense(config.hidden_size, config.ffn_size, execution)
        self.up = Dense(config.hidden_size, config.ffn_size, execution)
        self.down = Dense(config.ffn_size, config.hidden_size, execution)

    def __call__(self, x: Array, *, dropout_rate: float, dropout_keys: Array | None) -> Array:
        """x [B, T, D] -> [B, T, D]; dropout_keys [B], or None for no dropout."""
        # [B, T, F]
        product = jax.nn.silu(self.gate(x)) * self.up(x)
        if dropout_keys is not None:
            product = dropout(product, rate=dropout_rate, keys=dropout_keys)
        return self.down(product)
