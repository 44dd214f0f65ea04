# SPDX-License-Identifier: Apache-2.0
"""One chunk of one head for the XLA backend: the equations of `chunk` in their order.

What this adds to them is that a NaN stays where it belongs: it reaches every later token of its
segment, and no earlier one and no other segment. A plain product would hand it to every row, as
0 * NaN. Symbols as in `chunk`; masks are bool and C is a power of two.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2 import chunk
from atomic_kernels.gdn2.arithmetic import NN, Rounding, dot
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.levels import Undone, block_totals, undo_level
from atomic_kernels.gdn2.pairs import (
    WIDTH,
    Level,
    invert_unit_lower,
    level_operands,
    pair_gradients,
    pair_scores,
)


class Segments(NamedTuple):
    """Which tokens of a chunk see which: boolean masks."""

    same: Array  # [C, C] row and column are in one segment
    first: Array  # [C, 1] the row is in the segment that the incoming state belongs to
    last: Array  # [C, 1] the row is in the segment that the outgoing state belongs to
    carried: Array  # [1, 1] both states belong to one segment
    starts: Array  # [C, 1] the row is the first of its segment


class StateFactors(NamedTuple):
    """What stands between the chunk's tokens and the states at its two ends."""

    query: Array  # [C, K] Qt
    erase: Array  # [C, K] Kb
    key: Array  # [C, K] Kg
    total: Array  # [1, K] exp(gc_last)


class Prepared(NamedTuple):
    """What a chunk computes before it needs the state."""

    factors: StateFactors
    query_scores: Array  # [C, C] Aqk
    inverse: Array  # [C, C] A


class Recomputed(NamedTuple):
    """What the backward pass makes anew."""

    totals: list[Array]  # of the decays, over blocks of 1, 2, .. C tokens
    levels: list[Level]
    prepared: Prepared
    new_values: Array  # [C, V] Vn


def segments_of(rows: Array, columns: Array, incoming: Array) -> Segments:
    """Masks from the segment numbers of a chunk.

    rows [C, 1] and columns [1, C] hold the same numbers; incoming [1, 1] is the segment of the
    incoming state.
    """
    outgoing = rows[-1:]  # [1, 1]
    before = jnp.concatenate([incoming, rows[:-1]])  # [C, 1]
    return Segments(
        rows == columns, rows == incoming, rows == outgoing, outgoing == incoming, rows != before
    )


def prepare(
    q: Array, k: Array, g: Array, b: Array, segments: Segments | None, rounding: Rounding
) -> Prepared:
    """Decays, scores and the inverse. q [C, K] is already multiplied by the scale."""
    _, levels, factors = _climb(q, k, g, b, segments, rounding)
    query_scores, erase_scores = pair_scores(levels, 2)  # [C, C]
    if segments is not None:
        erase_scores = jnp.where(segments.same, erase_scores, 0.0)
    # Rows that are not finite stay out of the ladder, whose products would spread them to earlier
    # rows (0 * NaN), and are NaN again in its result.
    broken = ~jnp.isfinite(jnp.sum(erase_scores, 1, keepdims=True))  # [C, 1]
    inverse = invert_unit_lower(jnp.where(broken, 0.0, erase_scores), rounding)
    inverse = jnp.where(broken, jnp.nan, inverse)
    return Prepared(factors, _complete(query_scores, q, k, segments), inverse)


def recompute(
    inputs: Inputs, state: Array, inverse: Array, segments: Segments | None, rounding: Rounding
) -> Recomputed:
    """All that `prepare` and `forward` made, from the inputs, S^T before the chunk, and A."""
    q, k, v, g, b, w = inputs
    totals, levels, factors = _climb(q, k, g, b, segments, rounding)
    (query_scores,) = pair_scores(levels, 1)
    prepared = Prepared(factors, _complete(query_scores, q, k, segments), inverse)
    return Recomputed(totals, levels, prepared, solve(state, v, w, prepared, segments, rounding))


def _climb(q, k, g, b, segments, rounding):
    """Decays over blocks, the levels, and the factors, zero where another segment lies between."""
    decay = chunk.decay_factors(g, None if segments is None else segments.starts)
    totals = block_totals(decay, WIDTH)
    levels, query, erase, key = level_operands(q * decay, b * k * decay, k, totals, rounding)
    total = totals[-1]
    if segments is not None:
        query, erase = (jnp.where(segments.first, x, 0.0) for x in (query, erase))
        key = jnp.where(segments.last, key, 0.0)
        total = jnp.where(segments.carried, total, 0.0)
    return totals, levels, StateFactors(query, erase, key, total)


def _complete(query_scores: Array, q: Array, k: Array, segments: Segments | None) -> Array:
    """Aqk [C, C] with its diagonal, cut between segments."""
    rows = lax.broadcasted_iota(jnp.int32, query_scores.shape, 0)
    columns = lax.broadcasted_iota(jnp.int32, query_scores.shape, 1)
    query_scores = jnp.where(rows == columns, chunk.diagonal(q, k), query_scores)
    return query_scores if segments is None else jnp.where(segments.same, query_scores, 0.0)


def solve(
    state: Array, v: Array, w: Array, prepared: Prepared, segments: Segments | None,
    rounding: Rounding,
) -> Array:  # fmt: skip
    """Vn [C, V]."""
    written = chunk.written(v, w, prepared.factors.erase, state, rounding)  # [C, V] R
    if segments is not None:
        written = jnp.where(segments.first, written, w * v)  # the last segment's NaN ends here
    return causally(lambda x: chunk.new_values(prepared.inverse, x, rounding), written, segments)


def forward(
    state: Array, v: Array, w: Array, prepared: Prepared, segments: Segments | None,
    rounding: Rounding,
) -> tuple[Array, Array]:  # fmt: skip
    """O [C, V] and S'^T [V, K]."""
    new_values = solve(state, v, w, prepared, segments, rounding)  # [C, V]
    factors = prepared.factors
    read = chunk.read_state(factors.query, state, rounding)  # [C, V]
    carried, last = state, new_values
    if segments is not None:
        read = jnp.where(segments.first, read, 0.0)
        carried = jnp.where(segments.carried, state, 0.0)
        last = jnp.where(segments.last, new_values, 0.0)
    o = read + causally(
        lambda x: chunk.read_chunk(prepared.query_scores, x, rounding), new_values, segments
    )
    return o, chunk.next_state(carried, factors.total, last, factors.key, rounding)


def causally(product: Callable[[Array], Array], x: Array, segments: Segments | None) -> Array:
    """product(x) = L x [C, V] of a lower triangular L, where a non-finite x_j reaches the rows
    i >= j of its segment only.

    The rows that it must reach are found by a product of the mask with the places of the
    non-finite values (0 and 1: exact in one bfloat16 pass).
    """
    rows, columns = (lax.broadcasted_iota(jnp.int32, (x.shape[0],) * 2, axis) for axis in (0, 1))
    reaches = rows >= columns  # [C, C]
    if segments is not None:
        reaches = reaches & segments.same
    broken = ~jnp.isfinite(x)  # [C, V]
    hits = dot((reaches.astype(jnp.bfloat16),), (broken.astype(jnp.bfloat16),), NN)
    return jnp.where(hits > 0.0, jnp.nan, product(jnp.where(broken, 0.0, x)))


def backward_values(
    d_state: Array, d_o: Array, prepared: Prepared, rounding: Rounding
) -> tuple[Array, Array]:
    """dR [C, V], and dS^T [V, K] before the chunk."""
    (query, erase, key, total), query_scores, inverse = prepared
    d_new_values = chunk.d_new_values(query_scores, d_o, key, d_state, rounding)  # [C, V]
    d_written = chunk.d_written(inverse, d_new_values, rounding)
    before = chunk.d_state_before(d_state, total, d_o, query, d_written, erase, rounding)
    return d_written, before


def backward_inputs(
    inputs: Inputs, state: Array, d_state: Array, d_o: Array, d_written: Array,
    recomputed: Recomputed, segments: Segments | None, rounding: Rounding,
) -> Inputs:  # fmt: skip
    """The six input gradients; state S^T and d_state dS'^T [V, K]."""
    q, k, v, _, b, w = inputs
    totals, levels, prepared, new_values = recomputed
    d_scores = (
        chunk.d_query_scores(d_o, new_values, rounding),
        chunk.d_erase_scores(d_written, new_values, rounding),
    )  # [C, C]
    d_query, d_erase, d_key = chunk.d_factors(
        d_o, d_written, new_values, state, d_state, rounding
    )  # [C, K]
    factors = prepared.factors
    rows = factors.query * d_query + factors.erase * d_erase  # [C, K]
    keys = factors.key * d_key  # [C, K]
    total = chunk.d_total_decay(state, d_state, factors.total)  # [1, K]
    done = Undone(d_query, d_erase, d_key, rows, keys, total)
    for number in reversed(range(len(levels))):
        found = pair_gradients(levels[number], number, *d_scores, rounding)
        done = lax.optimization_barrier(undo_level(done, found, totals, number, WIDTH))
    diagonal = chunk.d_diagonal(d_o, new_values)  # [C, 1]
    d_q, d_k, d_b = chunk.d_keys((q, k, b), totals[0], diagonal, done.query, done.erase, done.key)
    d_g = done.rows + done.decay  # [C, K]
    if segments is not None:
        d_g = jnp.where(segments.starts, 0.0, d_g)  # nothing passes a segment's start
    d_v, d_w = chunk.d_values(v, w, d_written)
    return Inputs(d_q, d_k, d_v, d_g, d_b, d_w)
