# SPDX-License-Identifier: Apache-2.0
"""The GDN-2 mixer with short convolutions and low-rank gates, as in Berlm and GDN-2 370M."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.config import ModelConfig
from atomic_lib.model.context import TokenContext
from atomic_lib.model.execution import Execution
from atomic_lib.model.gate_statistics import GateStatistics, gate_statistics
from atomic_lib.model.layers import Dense, RMSNorm
from atomic_lib.model.mixers.gdn2 import (
    close_on_padding,
    decoding_backend,
    run_recurrence,
    split_heads,
)
from atomic_lib.model.short_convolution import ShortConvolution

Array = jax.Array


class GDN2ConvState(NamedTuple):
    """memory [B, H, K, V] float32; each convolution's last taps - 1 inputs [B, taps-1, H K]."""

    memory: Array
    q_tail: Array
    k_tail: Array
    v_tail: Array


class GDN2Conv(nnx.Module):
    """y = concat_h(rmsnorm(o) * sigmoid(gate)) W_o, where o is the recurrence of `gdn2.py` with

        q, k = l2norm(conv(x W_q)), l2norm(conv(x W_k)) a head;  v = conv(x W_v)
        b = sigmoid(x W_b), w = sigmoid(x W_w)
        g = -exp(A_log) * softplus(x W_decay_down W_decay_up + dt_bias)
        gate = x W_gate_down W_gate_up + bias

    conv is the short causal convolution with SiLU; the norm's scale is shared by the heads.
    6 D H K + 3 taps H K + 2 R (D + H K) + H + 2 H K + K parameters.
    """

    def __init__(self, config: ModelConfig, execution: Execution):
        width, rank = config.hidden_size, config.gate_rank
        inner = config.num_heads * config.head_dim
        self.heads, self.head_dim, self.taps = config.num_heads, config.head_dim, config.conv_taps
        self.backend = execution.gdn2_backend
        self.compute_dtype = execution.compute_dtype
        self.q = Dense(width, inner, execution)
        self.k = Dense(width, inner, execution)
        self.v = Dense(width, inner, execution)
        self.w = Dense(width, inner, execution)
        self.b = Dense(width, inner, execution)
        self.q_conv = ShortConvolution(config.conv_taps, inner)
        self.k_conv = ShortConvolution(config.conv_taps, inner)
        self.v_conv = ShortConvolution(config.conv_taps, inner)
        self.decay_down = Dense(width, rank, execution)
        self.decay_up = Dense(rank, inner, execution)
        self.A_log = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros((inner,), jnp.float32))
        self.gate_down = Dense(width, rank, execution)
        self.gate_up = Dense(rank, inner, execution, use_bias=True)
        self.out_norm = RMSNorm(config.head_dim, epsilon=config.norm_epsilon)
        self.o = Dense(inner, width, execution)

    def initial_state(self, batch_size: int, max_length: int) -> GDN2ConvState:
        """Returns zeros; the state does not grow with `max_length`."""
        memory = (batch_size, self.heads, self.head_dim, self.head_dim)
        tail = jnp.zeros(
            (batch_size, self.taps - 1, self.heads * self.head_dim), self.compute_dtype
        )
        return GDN2ConvState(jnp.zeros(memory, jnp.float32), tail, tail, tail)

    def __call__(
        self, x: Array, context: TokenContext, state: GDN2ConvState | None
    ) -> tuple[Array, GDN2ConvState | None, GateStatistics]:
        """x [B, T, D] -> (y [B, T, D], new state, statistics of the gates)."""
        tails = (None, None, None) if state is None else state[1:]
        # [B, T, H K] each
        q, q_tail = self.q_conv(self.q(x), tails[0], context)
        k, k_tail = self.k_conv(self.k(x), tails[1], context)
        v, v_tail = self.v_conv(self.v(x), tails[2], context)
        g, b, w = self.decay_up(self.decay_down(x)), self.b(x), self.w(x)
        q, k, v, g = (split_heads(part, self.heads) for part in (q, k, v, g))  # [B, T, H, K] each
        A_log, dt_bias = self.A_log[...], self.dt_bias[...].reshape(self.heads, self.head_dim)
        statistics = gate_statistics(g, b, w, A_log=A_log, dt_bias=dt_bias)
        b, w = split_heads(b, self.heads), split_heads(w, self.heads)
        g, b, w = (close_on_padding(gate, context.valid) for gate in (g, b, w))
        o, memory = run_recurrence(
            q, k, v, g, b, w,
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=None if state is None else state.memory,
            segment_ids=context.segment_ids,
            backend=decoding_backend(self.backend, x.shape[1]),
        )  # fmt: skip
        gate = split_heads(self.gate_up(self.gate_down(x)), self.heads)
        gated = self.out_norm(o) * jax.nn.sigmoid(gate)
        y = self.o(gated.reshape(*x.shape[:2], -1))
        new_state = None if state is None else GDN2ConvState(memory, q_tail, k_tail, v_tail)
        return y, new_state, statistics
