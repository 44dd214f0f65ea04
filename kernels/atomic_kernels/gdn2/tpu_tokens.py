# SPDX-License-Identifier: Apache-2.0
"""What the forward and the backward kernel do alike before they need the state.

For each key head of a grid step: activate and mask the tokens, then make the operands of every
level (`levels`): x = q e and (b k) e in the upper half of the rows, k in the lower half.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2 import chunk as equations
from atomic_kernels.gdn2 import gates, levels, tpu_chunk
from atomic_kernels.gdn2.arithmetic import Operand
from atomic_kernels.gdn2.tpu_blocks import InputRefs, Plan, read_keys, read_values
from atomic_kernels.gdn2.tpu_layout import (
    SUBLANES,
    Layout,
    Ref,
    read_rows,
    read_steps,
    row_numbers,
    write_parts,
    write_rows,
    write_steps,
)


class TokenScratch(NamedTuple):
    """Padded float32 [heads, tiles, 8 pitch, lanes]; left [heads, levels, parts, C, K]."""

    query: Ref
    erase: Ref
    key: Ref
    decay: Ref
    left: Ref  # upper half of q e, then of (b k) e


class Chunk(NamedTuple):
    """Which tokens of this grid step's chunk are real, and where segments start."""

    valid: Array | None  # [C, 1] bool, None if all are
    starts: Array | None  # [C, 1] bool, None if nowhere


def token_scratch(plan: Plan, level_count: int) -> list:
    layout, rounding = plan.layout, plan.layout.rounding
    padded = pltpu.VMEM((plan.heads, *layout.padded(layout.key_size)), jnp.float32)
    shape = (plan.heads, level_count, rounding.coarse_parts, layout.chunk, layout.key_size)
    operand = pltpu.VMEM(shape, rounding.dtype)
    return [padded] * 4 + [operand]


def describe_chunk(plan: Plan, number: Array, starts_ref) -> Chunk:
    size = plan.layout.chunk
    valid = starts = None
    if plan.length % size:
        valid = row_numbers(size, 1) < plan.length - number * size
    if plan.segmented:
        # The flags come along the lanes; a transposed square has them along the sublanes.
        square = jnp.broadcast_to(starts_ref[0].astype(jnp.float32), (size, size))
        starts = jnp.transpose(square)[:, :1] != 0.0
        if valid is not None:
            starts = starts & valid  # beyond T there is anything; the state must pass unharmed
    return Chunk(valid, starts)


def raw_keys(plan: Plan, refs: InputRefs, head: int, chunk: Chunk) -> tuple[Array, ...]:
    """q, k, g, b [C, K] as they came, rows beyond T zero; log_rate and bias [1, K] if given."""
    raw = [_float32(read_keys(plan, x, head), chunk) for x in (refs.q, refs.k, refs.g, refs.b)]
    if plan.decay_rows:
        columns = plan.key_columns(head)
        raw += [refs.log_rate[:, columns], refs.bias[:, columns]]
    return tuple(raw)


def raw_values(plan: Plan, refs: InputRefs, head: int, chunk: Chunk) -> tuple[Array, Array]:
    """v, w [C, V] as they came, rows beyond T zero."""
    return load_values(plan, refs.v, head, chunk), load_values(plan, refs.w, head, chunk)


def activate_keys(plan: Plan, chunk: Chunk, *raw: Array) -> tuple[Array, Array, Array, Array]:
    """q times the scale, k, g, b [C, K]."""
    q, k, g, b = raw[:4]
    projections = plan.projections
    if projections is not None:
        if projections.qk_l2norm:
            q, k = gates.l2_normalise(q), gates.l2_normalise(k)
        log_rate = None
        if plan.decay_rows:
            log_rate, bias = raw[4:]
            log_rate, g = jnp.broadcast_to(log_rate, g.shape), g + bias
        g = gates.decay_of_rate(g, log_rate, projections.lower_bound)
        b = jax.nn.sigmoid(b) * (2.0 if projections.negative_eigenvalues else 1.0)
        if chunk.valid is not None:
            g = jnp.where(chunk.valid, g, 0.0)  # rows beyond T must not decay the state
    return q * plan.scale, k, g, b


def activate_values(plan: Plan, v: Array, w: Array) -> tuple[Array, Array]:
    return v, w if plan.projections is None else jax.nn.sigmoid(w)


def load_tokens(
    plan: Plan, chunk: Chunk, refs: InputRefs, scratch: TokenScratch, scores: Ref, head: int
) -> None:
    """x = q e and (b k) e, k, and e, in order [C, K]; and the scores' diagonal q_i k_i, which no
    decay touches, in an otherwise zero [C, C]."""
    layout = plan.layout
    q, k, g, b = activate_keys(plan, chunk, *raw_keys(plan, refs, head, chunk))
    decay = equations.decay_factors(g, chunk.starts)
    write_rows(scratch.query.at[head], q * decay, layout)
    write_rows(scratch.erase.at[head], b * k * decay, layout)
    write_rows(scratch.key.at[head], k, layout)
    write_rows(scratch.decay.at[head], decay, layout)
    diagonal = jnp.where(tpu_chunk.identity(layout.chunk), equations.diagonal(q, k), 0.0)
    write_rows(scores.at[head], diagonal, layout)


def write_low_rows(scratch: TokenScratch, head: int, totals: list[Array], layout: Layout) -> None:
    """Left operands of the levels within runs; leaves x with its products over the run."""
    half_rows = layout.chunk // 2
    for number, ref in enumerate((scratch.query.at[head], scratch.erase.at[head])):
        x = read_steps(ref, layout)
        rows = slice(number * half_rows, (number + 1) * half_rows)
        for level in range(layout.low_levels):
            operand = layout.rounding.coarse(levels.upper(x, SUBLANES << level))  # [C/2, K]
            write_parts(scratch.left.at[head, level], rows, operand)
            x = levels.climb_rows(x, totals, level, SUBLANES)
        write_steps(ref, x, layout)


def low_keys(
    scratch: TokenScratch, head: int, totals: list[Array], layout: Layout
) -> Iterator[tuple[Operand, Array]]:
    """Level by level within runs: the right operand [C, K] in order, and k [C, K] by steps.

    Leaves k with its products over the run.
    """
    ref = scratch.key.at[head]
    k = read_steps(ref, layout)
    for level in range(layout.low_levels):
        yield layout.rounding.coarse(read_rows(ref, layout)), k
        k = levels.climb_keys(k, totals, level, SUBLANES)
        changed = tpu_chunk.numbers(layout.run, 1 << level, above=False)
        write_steps(ref, k, layout, changed)


def high_operands(
    scratch: TokenScratch, head: int, level: int, factors: tpu_chunk.RunFactors, layout: Layout
) -> tuple[Operand, Operand]:
    """Operands of a level between runs: left [C, K], upper runs of x twice; right [C, K], k, fine:
    identical keys round alike, and in a level of C/2 columns those errors are a sum."""
    half = layout.run << level
    query, erase, key = (
        read_rows(ref.at[head], layout) for ref in (scratch.query, scratch.erase, scratch.key)
    )
    if level:
        query = tpu_chunk.scale_runs(query, factors.before[level])
        erase = tpu_chunk.scale_runs(erase, factors.before[level])
        key = tpu_chunk.scale_runs(key, factors.after[level])
    left = jnp.concatenate([levels.upper(query, half), levels.upper(erase, half)], 0)
    return layout.rounding.coarse(left), layout.rounding.fine(key)


def chunk_operands(
    scratch: TokenScratch, head: int, factors: tpu_chunk.RunFactors, layout: Layout
) -> tuple[Array, Array, Array]:
    """q exp(gc), (b k) exp(gc) and k exp(gc_last - gc), float32 [C, K]."""
    before, after = factors.before[-1], factors.after[-1]
    return (
        tpu_chunk.scale_runs(read_rows(scratch.query.at[head], layout), before),
        tpu_chunk.scale_runs(read_rows(scratch.erase.at[head], layout), before),
        tpu_chunk.scale_runs(read_rows(scratch.key.at[head], layout), after),
    )


def read_state(plan: Plan, source, state) -> None:
    """S^T [heads, V, K] from a block [1, value heads, K, V / G], zeros without one."""
    for head in range(plan.heads):
        if source is None:
            state[head] = jnp.zeros(state.shape[1:], jnp.float32)
            continue
        for n in range(plan.group):
            rows = slice(n * plan.value_width, (n + 1) * plan.value_width)
            state[head, rows] = jnp.transpose(source[0, head * plan.group + n])


def write_state(plan: Plan, state, target) -> None:
    """The reverse of `read_state`."""
    for head in range(plan.heads):
        for n in range(plan.group):
            rows = slice(n * plan.value_width, (n + 1) * plan.value_width)
            target[0, head * plan.group + n] = jnp.transpose(state[head, rows])


def load_values(plan: Plan, ref: Ref, head: int, chunk: Chunk) -> Array:
    """v, w or dO [C, V] in float32, rows beyond T zero."""
    return _float32(read_values(plan, ref, head), chunk)


def load_output_gradient(plan: Plan, ref: Ref, head: int, chunk: Chunk) -> Operand:
    """dO [C, V] as a matrix operand; bfloat16 needs no rounding."""
    d_o = read_values(plan, ref, head)
    if d_o.dtype == jnp.bfloat16 and plan.layout.parts and chunk.valid is None:
        return (d_o,)
    return plan.layout.rounding.coarse(_float32(d_o, chunk))


def _float32(x: Array, chunk: Chunk) -> Array:
    x = x.astype(jnp.float32)
    return x if chunk.valid is None else jnp.where(chunk.valid, x, 0.0)
