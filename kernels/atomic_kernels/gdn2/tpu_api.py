# SPDX-License-Identifier: Apache-2.0
"""GDN-2 through the two fused TPU kernels: layout of the arrays, tiles, and the gradient rule.

Arrays are viewed in the order in which they lie in memory (`tpu_blocks`): no copies. The value
heads of a key head are columns of V for the kernels, so scores and inverse are made once for all.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.tpu import InterpretParams

from atomic_kernels.gdn2 import tpu_backward, tpu_forward, tpu_tiles
from atomic_kernels.gdn2.arithmetic import PRECISION_PARTS
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.gates import Projections
from atomic_kernels.gdn2.tpu_blocks import InputArrays, Plan, head_major
from atomic_kernels.gdn2.tpu_layout import Layout

HEAD_SIZES = (64, 128, 256)


def gdn2_tpu(
    inputs: Inputs,
    projections: Projections | None,
    gate_parameters: tuple[Array | None, Array | None],
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int | None,
    precision: str,
    interpret: bool | InterpretParams,
    heads_a_step: int = 0,
) -> tuple[Array, Array]:
    """o [B, T, Hv, V] in v's dtype and the last state [B, Hv, K, V] float32; see `api.gdn2`.

    gate_parameters (A_log [H], dt_bias [H, K]) belong to projections. heads_a_step overrules
    `tpu_tiles` in both kernels, to measure it. Raises NotImplementedError for head sizes other than
    64, 128 and 256 and for chunk sizes that the kernels do not have.
    """
    _, length, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    _check_sizes(key_size, value_size, chunk_size)
    layout = Layout(
        chunk=chunk_size or tpu_tiles.CHUNK_SIZES[0],
        key_size=key_size,
        value_size=value_heads // heads * value_size,
        parts=PRECISION_PARTS[precision],
        interpret=interpret,
    )
    plan = Plan(
        layout=layout,
        key_heads=heads,
        heads=heads_a_step,
        group=value_heads // heads,
        scale=float(scale),
        length=length,
        segmented=segment_ids is not None,
        # Raw projections are matrix products, [B, T, H D] in memory whatever H is.
        keys_head_major=projections is None and head_major(heads),
        values_head_major=projections is None and head_major(value_heads),
        projections=projections,
        decay_rows=any(x is not None for x in gate_parameters),
    )
    log_rate = bias = None
    if plan.decay_rows:
        log_rate, bias = _gate_rows(*gate_parameters, heads, key_size)
    q, k, g, b = (
        _ordered(x, plan.keys_head_major) for x in (inputs.q, inputs.k, inputs.g, inputs.b)
    )
    v, w = (_ordered(x, plan.values_head_major) for x in (inputs.v, inputs.w))
    starts = _segment_starts(segment_ids)
    arrays = InputArrays(q, k, v, g, b, w, log_rate, bias, starts)
    o, state = _gdn2(plan, arrays, initial_state)
    return o.swapaxes(1, 2) if plan.values_head_major else o.reshape(inputs.v.shape), state


def _ordered(x: Array, head_major: bool) -> Array:
    """x [B, T, heads, D] as [B, heads, T, D] or as [B, T, heads D]."""
    return x.swapaxes(1, 2) if head_major else x.reshape(*x.shape[:2], -1)


def _check_sizes(key_size: int, value_size: int, chunk_size: int | None) -> None:
    for name, size in (("K", key_size), ("V", value_size)):
        if size not in HEAD_SIZES:
            raise NotImplementedError(
                f"backend 'tpu' has head sizes {HEAD_SIZES}, got {name} = {size}: pad the heads, "
                "or use backend 'xla'."
            )
    if chunk_size not in (None, *tpu_tiles.CHUNK_SIZES):
        raise NotImplementedError(
            f"backend 'tpu' has chunk_size {tpu_tiles.CHUNK_SIZES}, got {chunk_size}: leave it "
            "out, or use backend 'xla'."
        )


def _gate_rows(A_log: Array | None, dt_bias: Array | None, heads: int, key_size: int):
    """log_rate and bias [1, H K] float32."""
    log_rate = jnp.zeros(heads) if A_log is None else A_log.astype(jnp.float32)
    bias = jnp.zeros((heads, key_size)) if dt_bias is None else dt_bias.astype(jnp.float32)
    return jnp.repeat(log_rate, key_size)[None], bias.reshape(1, -1)


def _segment_starts(segment_ids: Array | None) -> Array | None:
    """[B, 1, T] int32, 1 where a segment starts; the first one goes on from the initial state."""
    if segment_ids is None:
        return None
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(starts, ((0, 0), (1, 0))).astype(jnp.int32)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gdn2(plan: Plan, arrays: InputArrays, initial_state: Array | None) -> tuple[Array, Array]:
    """o, ordered like v, and the last state [B, H G, K, V / G]."""
    o, state, _, _ = tpu_forward.forward(
        tpu_tiles.tiled(plan, "forward"), arrays, initial_state, save=False
    )
    return o, state


def _forward_rule(plan, arrays, initial_state):
    o, state, states, inverses = tpu_forward.forward(
        tpu_tiles.tiled(plan, "forward"), arrays, initial_state, save=True
    )
    return (o, state), (arrays, initial_state is not None, states, inverses)


def _backward_rule(plan, residuals, cotangents):
    arrays, has_state, states, inverses = residuals
    plan = tpu_tiles.tiled(plan, "backward")
    token_gradients, d_state, d_rows = tpu_backward.backward(
        plan, arrays, cotangents[0], states, inverses, cotangents[1]
    )
    rows: list[Array | None] = [x.sum(0) for x in d_rows] or [None, None]
    gradients = InputArrays._make([*token_gradients, *rows, None])
    return gradients, d_state if has_state else None


_gdn2.defvjp(_forward_rule, _backward_rule)
