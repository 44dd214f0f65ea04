# SPDX-License-Identifier: Apache-2.0
"""The GDN-2 mixer of Atomic-GDN2: seven dense matrices and the recurrence."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from atomic_kernels.gdn2 import gdn2_from_projections
from atomic_kernels.norms import normalise
from flax import nnx

from atomic_lib.model.config import ModelConfig
from atomic_lib.model.context import TokenContext
from atomic_lib.model.execution import Execution
from atomic_lib.model.gate_statistics import GateStatistics, gate_statistics
from atomic_lib.model.layers import Dense, rms_normalise

Array = jax.Array

# A raw gate this low is closed exactly: softplus and sigmoid of it are 0 in float32, and so are
# their derivatives. bfloat16 holds it.
CLOSED_GATE = -1e4


class GDN2State(NamedTuple):
    """memory [B, H, K, V] float32, the recurrent state."""

    memory: Array


def decoding_backend(backend: str, length: int) -> str:
    """Returns the backend for a row of `length` tokens: one token is one step of the recurrence.

    A chunk of one token would be 63 parts padding.
    """
    return "reference" if length == 1 else backend


def split_heads(x: Array, heads: int) -> Array:
    """[B, T, H K] -> [B, T, H, K]."""
    return x.reshape(*x.shape[:2], heads, -1)


def close_on_padding(raw_gate: Array, valid: Array | None) -> Array:
    """Closes a raw gate [B, T, H, K] on padding, so that the recurrence passes over it."""
    if valid is None:
        return raw_gate
    return jnp.where(valid[:, :, None, None], raw_gate, CLOSED_GATE)


@partial(jax.jit, static_argnames="backend")
def run_recurrence(
    *projections: Array,
    backend: str,
    initial_state: Array | None,
    segment_ids: Array | None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
) -> tuple[Array, Array]:
    """`gdn2_from_projections` of q, k, v, g, b, w, as a function that all layers share.

    Traced and lowered once for equal shapes: the fused kernels are long programs, and lowering them
    for each of 21 layers took most of a full-size step's compile time.
    """
    with jax.named_scope("gdn2_kernel"):  # the name by which a compiled step is read
        return gdn2_from_projections(
            *projections,
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=initial_state,
            segment_ids=segment_ids,
            backend=backend,
        )


class HeadNorm(nnx.Module):
    """RMSNorm of each head over its own channels, with one scale a head and channel."""

    def __init__(self, size: int, *, epsilon: float, implementation: str = "xla"):
        self.epsilon, self.implementation = epsilon, implementation
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """x [B, T, H, V] -> the same shape and dtype; float32 inside."""
        scale = self.scale[...]
        if self.implementation == "tpu":
            rows = x.reshape(-1, scale.size)
            no_bias = jnp.zeros_like(scale)
            y = normalise(rows, scale, no_bias, x.shape[-1], False, self.epsilon)
            return y.reshape(x.shape)
        scale = scale.reshape(x.shape[2:])
        return (rms_normalise(x, self.epsilon) * scale).astype(x.dtype)


class GDN2(nnx.Module):
    """y = concat_h(o) W_o, where o is the GDN-2 recurrence of x's six projections.

        q, k = l2norm(x W_q), l2norm(x W_k) a head;  v = x W_v
        b = sigmoid(x W_b), w = sigmoid(x W_w);      g = -softplus(x W_g)
        S~ = Diag(exp g) S;  S = S~ + k (w * v - S~^T (b * k))^T;  o = K^-1/2 S^T q

    7 D H K parameters; with `gdn2_out_norm` an RMSNorm of each head's o before W_o, H K more. No
    bias, no convolution, no output gate.
    """

    def __init__(self, config: ModelConfig, execution: Execution):
        inner = config.num_heads * config.head_dim
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.backend = execution.gdn2_backend
        self.q = Dense(config.hidden_size, inner, execution)
        self.k = Dense(config.hidden_size, inner, execution)
        self.v = Dense(config.hidden_size, inner, execution)
        self.w = Dense(config.hidden_size, inner, execution)
        self.b = Dense(config.hidden_size, inner, execution)
        self.g = Dense(config.hidden_size, inner, execution)
        self.has_out_norm = config.gdn2_out_norm
        if self.has_out_norm:
            self.out_norm = HeadNorm(
                inner, epsilon=config.norm_epsilon, implementation=execution.norms
            )
        self.o = Dense(inner, config.hidden_size, execution)

    def initial_state(self, batch_size: int, max_length: int) -> GDN2State:
        """Returns zeros; the state does not grow with `max_length`."""
        shape = (batch_size, self.heads, self.head_dim, self.head_dim)
        return GDN2State(jnp.zeros(shape, jnp.float32))

    def __call__(
        self, x: Array, context: TokenContext, state: GDN2State | None
    ) -> tuple[Array, GDN2State | None, GateStatistics]:
        """x [B, T, D] -> (y [B, T, D], new state, statistics of the gates)."""
        b, w = self.b(x), self.w(x)  # [B, T, H K] each
        q, k, v, g = (split_heads(p(x), self.heads) for p in (self.q, self.k, self.v, self.g))
        statistics = gate_statistics(g, b, w)
        b, w = split_heads(b, self.heads), split_heads(w, self.heads)  # [B, T, H, K] each
        g, b, w = (close_on_padding(gate, context.valid) for gate in (g, b, w))
        o, memory = run_recurrence(
            q, k, v, g, b, w,
            initial_state=None if state is None else state.memory,
            segment_ids=context.segment_ids,
            backend=decoding_backend(self.backend, x.shape[1]),
        )  # fmt: skip
        if self.has_out_norm:
            o = self.out_norm(o)
        y = self.o(o.reshape(*x.shape[:2], -1))
        return y, None if state is None else GDN2State(memory), statistics
