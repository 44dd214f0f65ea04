# SPDX-License-Identifier: Apache-2.0
"""Softmax attention, full or over a window, with or without rotary positions and output gate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.causal_attention import cached_attention, causal_attention, write_cache
from atomic_lib.model.config import ModelConfig
from atomic_lib.model.context import TokenContext
from atomic_lib.model.execution import Execution
from atomic_lib.model.layers import Dense
from atomic_lib.model.mixers.gdn2 import split_heads
from atomic_lib.model.rotary import rotate

Array = jax.Array


class AttentionCache(NamedTuple):
    """keys, values [B, S, H, K]; slot j holds position j."""

    keys: Array
    values: Array


class Attention(nnx.Module):
    """y = (concat_h(softmax(K^-1/2 q k^T) v) * sigmoid(x W_gate)) W_o.

    q, k, v = x W_q, x W_k, x W_v, the first two rotated by position unless positions are "nope";
    the gate is there if the configuration has `attention_gate`. 4 D H K parameters, 5 D H K with
    the gate.
    """

    def __init__(self, config: ModelConfig, execution: Execution, *, windowed: bool):
        self.heads, self.head_dim = config.attention_heads, config.attention_head_dim
        self.window = config.window_size if windowed else None
        positions = config.window_positions if windowed else config.attention_positions
        self.rope_theta = config.rope_theta if positions == "rope" else None
        self.implementation = execution.attention
        self.compute_dtype = execution.compute_dtype
        self.gated = config.attention_gate
        inner = self.heads * self.head_dim
        self.q = Dense(config.hidden_size, inner, execution)
        self.k = Dense(config.hidden_size, inner, execution)
        self.v = Dense(config.hidden_size, inner, execution)
        if self.gated:
            self.gate = Dense(config.hidden_size, inner, execution)
        self.o = Dense(inner, config.hidden_size, execution)

    def initial_state(self, batch_size: int, max_length: int) -> AttentionCache:
        """Returns an empty cache for `max_length` positions."""
        shape = (batch_size, max_length, self.heads, self.head_dim)
        return AttentionCache(*(jnp.zeros(shape, self.compute_dtype) for _ in range(2)))

    def __call__(
        self, x: Array, context: TokenContext, state: AttentionCache | None
    ) -> tuple[Array, AttentionCache | None, None]:
        """x [B, T, D] -> (y [B, T, D], new cache)."""
        # [B, T, H, K] each
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q, self.k, self.v))
        if self.rope_theta is not None:
            q, k = (rotate(part, context.positions, theta=self.rope_theta) for part in (q, k))
        options: dict[str, Any] = {
            "scale": self.head_dim**-0.5,
            "first_visible": context.first_visible,
            "window": self.window,
        }
        if state is None:
            o = causal_attention(q, k, v, implementation=self.implementation, **options)
        else:
            state = AttentionCache(
                *(
                    write_cache(cache, new, context.positions, context.valid)
                    for cache, new in zip(state, (k, v), strict=True)
                )
            )
            o = cached_attention(
                q, state.keys, state.values, positions=context.positions, **options
            )
        o = o.reshape(*x.shape[:2], -1)
        if self.gated:
            o = o * jax.nn.sigmoid(self.gate(x))
        return self.o(o), state, None
