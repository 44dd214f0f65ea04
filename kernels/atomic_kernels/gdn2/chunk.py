# SPDX-License-Identifier: Apache-2.0
"""GDN-2 over one chunk of one head: the equations, forward and backward, one function each.

The recurrence, for a token (S [K, V] state, everything else a row of the arrays below):

    S~  = Diag(exp g) S              r = w*v - S~^T (b*k)
    S'  = S~ + k r^T                 o = scale S'^T q

Over C tokens, with gc_i = g_0 + .. + g_i (every exponent below is <= 0 when g <= 0):

    Akk_ij = sum_d (b*k)_id k_jd exp(gc_id - gc_jd)    i > j      A = (I + Akk)^-1
    Aqk_ij = sum_d    q_id  k_jd exp(gc_id - gc_jd)    i >= j     (q carries the scale)
    Qt = q exp(gc)   Kb = b*k exp(gc)   Kg = k exp(gc_last - gc)
    R = w*v - Kb S   Vn = A R   O = Qt S + Aqk Vn   S' = Diag(exp gc_last) S + Kg^T Vn

Exponents are sums over the tokens between j and i (`decay`); scores and the inverse are in
`scores`. For float32 q, k, g, b [C, K]; v, w, o [C, V]; S [K, V]; masks are bool and C is a power
of two. Value heads that share a key head are further columns of V: no equation mixes columns of V.
What is sequential is only S from chunk to chunk; the backward needs the inputs, S before the
chunk, and A.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from atomic_kernels.gdn2.arithmetic import DotPrecision, dot
from atomic_kernels.gdn2.decay import Decays, local_decay_sums, local_decay_sums_gradient
from atomic_kernels.gdn2.scores import (
    column_numbers,
    identity,
    invert_unit_lower,
    pair_score_gradients,
    pair_scores,
    row_numbers,
)


class Segments(NamedTuple):
    """Which tokens of a chunk see which: boolean masks."""

    same: Array  # [C, C] row and column are in one segment
    first: Array  # [C, 1] the row is in the segment that the incoming state belongs to
    last: Array  # [C, 1] the row is in the segment that the outgoing state belongs to
    carried: Array  # [1, 1] both states belong to one segment


class StateFactors(NamedTuple):
    """The factors between the chunk's tokens and the states at its two ends."""

    query: Array  # [C, K] Qt
    erase: Array  # [C, K] Kb
    key: Array  # [C, K] Kg
    decay: Array  # [1, K] exp(gc_last)


def segments_of(rows: Array, columns: Array, incoming: Array) -> Segments:
    """Masks from the segment numbers of a chunk.

    rows [C, 1] and columns [1, C] hold the same numbers; incoming [1, 1] is the segment of the
    incoming state.
    """
    outgoing = rows[-1:]  # [1, 1]
    return Segments(rows == columns, rows == incoming, rows == outgoing, outgoing == incoming)


# Forward ----------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """What a chunk computes before it needs the state."""

    factors: StateFactors
    query_scores: Array  # [C, C] Aqk
    inverse: Array  # [C, C] A


class Inputs(NamedTuple):
    """The inputs of one chunk, q times the scale, or their gradients."""

    q: Array  # [C, K]
    k: Array  # [C, K]
    v: Array  # [C, V]
    g: Array  # [C, K]
    b: Array  # [C, K]
    w: Array  # [C, V]


def prepare(
    q: Array, k: Array, g: Array, b: Array, segments: Segments | None, precision: DotPrecision
) -> Prepared:
    """Decays, scores and the inverse. q [C, K] is already multiplied by the scale."""
    decays = local_decay_sums(g)
    erase_keys = b * k  # [C, K]
    query_scores, erase_scores = pair_scores((q, erase_keys), k, decays, precision)
    query_scores = complete_query_scores(query_scores, q, k, segments)
    if segments is not None:
        erase_scores = jnp.where(segments.same, erase_scores, 0.0)
    # Rows that are not finite stay out of the ladder, whose products would spread them to earlier
    # rows (0 * NaN), and are NaN again in its result.
    broken = ~jnp.isfinite(jnp.sum(erase_scores, 1, keepdims=True))  # [C, 1]
    inverse = invert_unit_lower(jnp.where(broken, 0.0, erase_scores), precision.inverse)  # [C, C]
    return Prepared(
        state_factors(q, erase_keys, k, decays, segments),
        query_scores,
        jnp.where(broken, jnp.nan, inverse),
    )


def complete_query_scores(
    query_scores: Array, q: Array, k: Array, segments: Segments | None
) -> Array:
    """Adds the diagonal q_i k_i, which no decay touches, and cuts between segments: Aqk [C, C]."""
    diagonal = jnp.sum(q * k, 1, keepdims=True)  # [C, 1]
    query_scores = jnp.where(identity(q.shape[0]), diagonal, query_scores)
    return query_scores if segments is None else jnp.where(segments.same, query_scores, 0.0)


def state_factors(
    q: Array, erase_keys: Array, k: Array, decays: Decays, segments: Segments | None
) -> StateFactors:
    """Qt, Kb, Kg [C, K] and exp(gc_last) [1, K]; zero where another segment lies between."""
    from_start, to_end = jnp.exp(decays.prefix), jnp.exp(decays.suffix)  # [C, K]
    query, erase, key = q * from_start, erase_keys * from_start, k * to_end  # [C, K]
    decay = jnp.exp(decays.total)  # [1, K]
    if segments is not None:
        query, erase = (jnp.where(segments.first, x, 0.0) for x in (query, erase))
        key = jnp.where(segments.last, key, 0.0)
        decay = jnp.where(segments.carried, decay, 0.0)
    return StateFactors(query, erase, key, decay)


def solve(
    state: Array,
    v: Array,
    w: Array,
    prepared: Prepared,
    segments: Segments | None,
    precision: DotPrecision,
) -> Array:
    """Vn = A (w*v - Kb S) [C, V]: what each token adds to the state."""
    read = dot(prepared.factors.erase, state, precision.read)  # [C, V]
    if segments is not None:
        read = jnp.where(segments.first, read, 0.0)  # 0 * NaN: the last segment's NaN ends here
    written = w * v - read  # [C, V] R
    return causal_dot(prepared.inverse, written, segments, precision.solve)


def forward(
    state: Array,
    v: Array,
    w: Array,
    prepared: Prepared,
    segments: Segments | None,
    precision: DotPrecision,
) -> tuple[Array, Array]:
    """O = Qt S + Aqk Vn [C, V] and S' = Diag(exp gc_last) S + Kg^T Vn [K, V]."""
    factors = prepared.factors
    new_values = solve(state, v, w, prepared, segments, precision)  # [C, V] Vn
    read = dot(factors.query, state, precision.read)  # [C, V]
    decayed = state * factors.decay.T  # [K, V]
    written = new_values
    if segments is not None:
        read = jnp.where(segments.first, read, 0.0)
        decayed = jnp.where(segments.carried, decayed, 0.0)
        written = jnp.where(segments.last, new_values, 0.0)
    o = read + causal_dot(prepared.query_scores, new_values, segments, precision.output)
    return o, decayed + dot(factors.key, written, precision.update, "tn")


def causal_dot(lower: Array, x: Array, segments: Segments | None, precision: str) -> Array:
    """lower [C, C] @ x [C, V], where a non-finite x_j reaches the rows i >= j of its segment only.

    The plain product would hand it to every row, as 0 * NaN. The rows that it must reach are
    found by a product of the mask with the places of the non-finite values (0 and 1: exact in
    one bfloat16 pass).
    """
    reaches = row_numbers(lower.shape[0]) >= column_numbers(lower.shape[0])  # [C, C]
    if segments is not None:
        reaches = reaches & segments.same
    broken = ~jnp.isfinite(x)  # [C, V]
    hits = dot(reaches.astype(jnp.float32), broken.astype(jnp.float32), "bf16")
    product = dot(lower, jnp.where(broken, 0.0, x), precision)  # [C, V]
    return jnp.where(hits > 0.0, jnp.nan, product)


# Backward ---------------------------------------------------------------------------------------


def backward_values(
    d_state: Array, d_o: Array, prepared: Prepared, precision: DotPrecision
) -> tuple[Array, Array]:
    """dR = A^T (Aqk^T dO + Kg dS') [C, V], and dS = Diag(exp gc_last) dS' + Qt^T dO - Kb^T dR."""
    factors = prepared.factors
    d_new_values = dot(prepared.query_scores, d_o, precision.output, "tn") + dot(
        factors.key, d_state, precision.update
    )  # [C, V] dVn
    d_written = dot(prepared.inverse, d_new_values, precision.solve, "tn")  # [C, V] dR
    d_state = (
        d_state * factors.decay.T
        + dot(factors.query, d_o, precision.read, "tn")
        - dot(factors.erase, d_written, precision.read, "tn")
    )  # [K, V]
    return d_written, d_state


def backward_inputs(
    inputs: Inputs,
    state: Array,
    d_state: Array,
    d_o: Array,
    d_written: Array,
    new_values: Array,
    decays: Decays,
    factors: StateFactors,
    segments: Segments | None,
    precision: DotPrecision,
) -> Inputs:
    """The six input gradients; d_state is dS' [K, V], state S [K, V].

    dAqk = tril(dO Vn^T)   dAkk = -stril(dR Vn^T)   (no A^T dA A^T is needed)
    dv = dR*w   dw = dR*v   dKb = -dR S^T   dQt = dO S^T   dKg = Vn dS'^T
    dq = dQt exp(gc) + Dq   d(bk) = dKb exp(gc) + Dkb   dk = d(bk)*b + dKg exp(..) + Dk
    db = d(bk)*k            dg: see local_decay_sums_gradient
    """
    q, k, v, _, b, w = inputs
    erase_keys = b * k
    d_scores = dot(
        jnp.concatenate([d_o, -d_written], 0), new_values, precision.pairs, "nt"
    )  # [2C, C]
    size = k.shape[0]
    d_query_scores, d_erase_scores = d_scores[:size], d_scores[size:]  # [C, C]
    if segments is not None:
        d_query_scores = jnp.where(segments.same, d_query_scores, 0.0)
        d_erase_scores = jnp.where(segments.same, d_erase_scores, 0.0)
    diagonal = jnp.where(identity(size), d_query_scores, 0.0).sum(1, keepdims=True)  # [C, 1]
    pairs = pair_score_gradients(
        d_query_scores, d_erase_scores, q, erase_keys, k, decays, precision
    )

    d_reads = dot(
        jnp.concatenate([d_o, -d_written], 0), state, precision.read, "nt"
    )  # [2C, K] dQt, dKb
    d_query_factor, d_erase_factor = d_reads[:size], d_reads[size:]  # [C, K]
    d_key_factor = dot(new_values, d_state, precision.update, "nt")  # [C, K] dKg
    from_start, to_end = jnp.exp(decays.prefix), jnp.exp(decays.suffix)  # [C, K]
    if segments is not None:
        from_start = jnp.where(segments.first, from_start, 0.0)
        to_end = jnp.where(segments.last, to_end, 0.0)

    d_q = d_query_factor * from_start + pairs.query + diagonal * k  # [C, K]
    d_erase_keys = d_erase_factor * from_start + pairs.erase  # [C, K]
    d_k = d_erase_keys * b + d_key_factor * to_end + pairs.key + diagonal * q  # [C, K]
    d_g = local_decay_sums_gradient(
        Decays(
            levels=pairs.levels,
            prefix=factors.query * d_query_factor + factors.erase * d_erase_factor,
            suffix=factors.key * d_key_factor,
            total=factors.decay * (state * d_state).sum(1, keepdims=True).T,
        )
    )  # [C, K]
    return Inputs(d_q, d_k, d_written * w, d_g, d_erase_keys * k, d_written * v)
