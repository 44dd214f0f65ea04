# SPDX-License-Identifier: Apache-2.0
"""The chunked GDN-2 in plain XLA: a scan over chunks with a hand-written gradient.

The functions of `xla_chunk` are mapped over batch and heads; only the state goes from chunk to
chunk, as S^T.
`chunks_at_once` chunks do their state-free work (decays, scores, inverse, and in the backward the
input gradients) together: 1 keeps a CPU's working set in its cache, more keep a GPU busy.

The backward saves the inputs, the state before each chunk and the inverse, and recomputes the
rest: per token and head K V / C + C float32 beside the inputs. Value heads of one key head lie
side by side as columns of V, so scores and inverse are made once for all of them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2 import xla_chunk
from atomic_kernels.gdn2.arithmetic import Rounding
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.gates import Projections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a call that is not an array."""

    scale: float
    chunk_size: int
    chunks_at_once: int
    rounding: Rounding
    projections: Projections | None = None  # how raw inputs are activated, None if they are not


# (A_log [H], dt_bias [H, K]), None for what there is not.
GateParameters = tuple[Array | None, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gdn2_chunked(
    plan: Plan,
    inputs: Inputs,
    gate_parameters: GateParameters,
    initial_state: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """o [B, T, H, G V] in v's dtype and the last state [B, H, G V, K] in float32.

    inputs q, k, g, b [B, T, H, K]; v, w [B, T, H, G V], the columns of G value heads;
    gate_parameters A_log [H] and dt_bias [H, K], None where there are none.
    """
    o, state, _ = _run_forward(
        plan, inputs, gate_parameters, initial_state, segment_ids, save=False
    )
    return o, state


def _forward_rule(plan, inputs, gate_parameters, initial_state, segment_ids):
    o, state, saved = _run_forward(
        plan, inputs, gate_parameters, initial_state, segment_ids, save=True
    )
    return (o, state), (inputs, gate_parameters, segment_ids, saved)


def _backward_rule(plan, residuals, cotangents):
    return *_run_backward(plan, *residuals, *cotangents), None


gdn2_chunked.defvjp(_forward_rule, _backward_rule)


def _run_forward(plan, inputs, gate_parameters, initial_state, segment_ids, *, save):
    """(o, last state, (states before each chunk, inverses), both [N/G, G, B H, ., .])."""
    groups = _Groups(plan, inputs, gate_parameters, segment_ids)

    def prepare(segments, values):
        q, k, _, g, b, _ = values
        return xla_chunk.prepare(q, k, g, b, segments, plan.rounding)

    def forward(segments, state, values, prepared):
        return xla_chunk.forward(state, values.v, values.w, prepared, segments, plan.rounding)

    def group_step(state, index):
        segments = groups.segments(index)
        values = groups.activate(index, groups.raw(index), gate_parameters)  # [G, B H, C, .]
        prepared = _over_chunks(prepare)(segments, values)

        def chunk_step(state, chunks):
            segments, values, prepared = chunks
            o, after = jax.vmap(forward)(segments, state, values, prepared)
            return after, (o, state)

        state, (o, states) = lax.scan(chunk_step, state, (segments, values, prepared))
        saved = (states, prepared.inverse) if save else None
        return state, (groups.by_token(o, inputs.v.dtype), saved)

    shape = initial_state.shape
    initial_state = initial_state.reshape(-1, *shape[2:])  # [B H, V, K]
    state, (o, saved) = lax.scan(group_step, initial_state, jnp.arange(groups.count))
    return groups.join(o), state.reshape(shape), saved


def _run_backward(plan, inputs, gate_parameters, segment_ids, saved, d_o, d_state):
    """The gradients of the inputs, the gate parameters and the initial state."""
    groups = _Groups(plan, inputs, gate_parameters, segment_ids)
    rounding = plan.rounding
    d_o = groups.pad(d_o)
    gate_parameters32 = jax.tree.map(lambda x: x.astype(jnp.float32), gate_parameters)

    def recompute(segments, values, state, inverse):
        return xla_chunk.recompute(values, state, inverse, segments, rounding)

    def values_gradient(d_state, d_o, prepared):
        return xla_chunk.backward_values(d_state, d_o, prepared, rounding)

    def inputs_gradient(segments, values, state, d_state, d_o, d_written, recomputed):
        return xla_chunk.backward_inputs(
            values, state, d_state, d_o, d_written, recomputed, segments, rounding
        )

    def group_step(carry, group):
        d_state, d_parameters = carry
        index, states, inverses = group
        segments = groups.segments(index)
        values, activation_gradient = jax.vjp(
            functools.partial(groups.activate, index), groups.raw(index), gate_parameters32
        )  # [G, B H, C, .]
        d_o_group = groups.slice(d_o, index)
        recomputed = _over_chunks(recompute)(segments, values, states, inverses)

        def chunk_step(d_state, chunks):
            d_written, before = jax.vmap(values_gradient)(d_state, *chunks)
            return before, (d_written, d_state)

        d_state, (d_written, d_states) = lax.scan(
            chunk_step, d_state, (d_o_group, recomputed.prepared), reverse=True
        )
        gradients = _over_chunks(inputs_gradient)(
            segments, values, states, d_states, d_o_group, d_written, recomputed
        )
        d_raw, d_parameters_here = activation_gradient(gradients)
        d_parameters = jax.tree.map(jnp.add, d_parameters, d_parameters_here)
        d_inputs = [groups.by_token(d, x.dtype) for d, x in zip(d_raw, inputs, strict=True)]
        return (d_state, d_parameters), Inputs(*d_inputs)

    shape = d_state.shape
    d_state = d_state.reshape(-1, *shape[2:])  # [B H, V, K]
    no_gradient = jax.tree.map(jnp.zeros_like, gate_parameters32)
    (d_state, d_parameters), d_inputs = lax.scan(
        group_step, (d_state, no_gradient), (jnp.arange(groups.count), *saved), reverse=True
    )
    d_parameters = jax.tree.map(lambda d, x: d.astype(x.dtype), d_parameters, gate_parameters)
    return Inputs(*map(groups.join, d_inputs)), d_parameters, d_state.reshape(shape)


class _Groups:
    """Cuts [B, T, H, N] arrays into groups of G chunks [G, B H, C, N], and joins them again."""

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        gate_parameters: GateParameters,
        segment_ids: Array | None,
    ):
        self.plan = plan
        self.gate_parameters = gate_parameters
        self.batch, self.length, self.heads, _ = inputs.q.shape
        rows = plan.chunk_size * plan.chunks_at_once
        self.count = -(-self.length // rows)
        self.padding = self.count * rows - self.length
        # k = g = b = w = 0 leaves the state as it is.
        self.inputs = Inputs(*map(self.pad, inputs))
        self.segment_ids = segment_ids
        if segment_ids is not None:
            padded = jnp.pad(segment_ids, ((0, 0), (0, self.padding)), mode="edge")
            self.segment_ids = jnp.repeat(padded, self.heads, axis=0)  # [B H, T]

    def pad(self, x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, self.padding), (0, 0), (0, 0))) if self.padding else x

    def slice(self, x: Array, index: Array) -> Array:
        """[B, T, H, N] -> group `index` [G, B H, C, N] in float32."""
        count, size = self.plan.chunks_at_once, self.plan.chunk_size
        rows = lax.dynamic_slice_in_dim(x, index * (count * size), count * size, 1)
        batch, _, heads, width = x.shape
        rows = rows.astype(jnp.float32).reshape(batch, count, size, heads, width)
        return rows.transpose(1, 0, 3, 2, 4).reshape(count, batch * heads, size, width)

    def raw(self, index: Array) -> Inputs:
        return Inputs(*(self.slice(x, index) for x in self.inputs))

    def activate(self, index: Array, raw: Inputs, gate_parameters: GateParameters) -> Inputs:
        """The chunk functions' inputs from those of the call: activated, q times the scale."""
        values = raw
        if self.plan.projections is not None:
            A_log, dt_bias = gate_parameters
            if A_log is not None:
                A_log = jnp.tile(A_log, self.batch)[:, None]  # [B H, 1]
            if dt_bias is not None:
                dt_bias = jnp.tile(dt_bias, (self.batch, 1))[:, None]  # [B H, 1, K]
            values = self.plan.projections.activate(raw, A_log, dt_bias)
            if self.padding:
                # softplus(dt_bias) would let the padding decay the state, sigmoid(0) write to it.
                shape = (self.plan.chunks_at_once, 1, self.plan.chunk_size, 1)
                rows = shape[0] * shape[2]
                inside = (index * rows + jnp.arange(rows)).reshape(shape) < self.length
                values = values._replace(
                    **{name: jnp.where(inside, getattr(values, name), 0.0) for name in "gbw"}
                )
        return values._replace(q=values.q * self.plan.scale)

    def segments(self, index: Array) -> xla_chunk.Segments | None:
        """Masks [G, B H, ., .] of group `index`."""
        if self.segment_ids is None:
            return None
        count, size = self.plan.chunks_at_once, self.plan.chunk_size
        start = index * (count * size)
        ids = lax.dynamic_slice_in_dim(self.segment_ids, start, count * size, 1)
        ids = ids.reshape(-1, count, size).swapaxes(0, 1)  # [G, B H, C]
        before = lax.dynamic_slice_in_dim(self.segment_ids, jnp.maximum(start - 1, 0), 1, 1)
        incoming = jnp.concatenate([before.T, ids[:-1, :, -1]])  # [G, B H]
        masks = jax.vmap(jax.vmap(xla_chunk.segments_of))
        return masks(ids[..., None], ids[..., None, :], incoming[..., None, None])

    def by_token(self, x: Array, dtype: jax.typing.DTypeLike) -> Array:
        """[G, B H, C, N] -> [B, G C, H, N]."""
        count, _, size, width = x.shape
        x = x.reshape(count, self.batch, self.heads, size, width).transpose(1, 0, 3, 2, 4)
        return x.reshape(self.batch, count * size, self.heads, width).astype(dtype)

    def join(self, x: Array) -> Array:
        """[N/G, B, G C, H, N] -> [B, T, H, N]."""
        x = x.swapaxes(0, 1).reshape(self.batch, -1, self.heads, x.shape[-1])
        return x[:, : self.length]


def _over_chunks(function: Callable) -> Callable:
    """Maps function over arrays [G, B H, ..].

    The two axes are made one: XLA's simplifier (jaxlib 0.10.2) aborts on some products with three
    batch axes, and one is faster than two.
    """

    def mapped(*arrays):
        lead = jax.tree.leaves(arrays)[0].shape[:2]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
        results = jax.vmap(function)(*flat)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)

    return mapped
