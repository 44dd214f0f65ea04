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

Exponents are sums over the tokens between j and i, never differences of chunk-long sums: see
`local_decay_sums`. For float32 q, k, g, b [C, K]; v, w, o [C, V]; S [K, V]; masks are bool and
C is a power of two. Value heads that share a key head are further columns of V: no equation
mixes columns of V. All arrays are float32; what is sequential is only S from chunk to chunk;
the backward needs the inputs, S before the chunk, and A.

Only elementwise operations, products, slices and concatenations are used, so that a Pallas TPU
body can call these functions; how rows are exchanged and products rounded is in `Arithmetic`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2.arithmetic import Arithmetic


class Segments(NamedTuple):
    """Which tokens of a chunk see which: boolean masks."""

    same: Array  # [C, C] row and column are in one segment
    first: Array  # [C, 1] the row is in the segment that the incoming state belongs to
    last: Array  # [C, 1] the row is in the segment that the outgoing state belongs to
    carried: Array  # [1, 1] both states belong to one segment


class Decays(NamedTuple):
    """Sums of g in nats; level n pairs blocks of 2^n rows."""

    levels: tuple[Array, ...]  # log2(C) times [C, K], see local_decay_sums
    prefix: Array  # [C, K] sum over 0..i
    suffix: Array  # [C, K] sum over i+1..C-1
    total: Array  # [1, K]


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


# Decay ------------------------------------------------------------------------------------------


def local_decay_sums(g: Array, arithmetic: Arithmetic) -> Decays:
    """Sums of g over blocks of every power-of-two size, by a butterfly over log2(C) steps.

    At the level with blocks of h rows, every row of an odd block holds the sum from its block's
    start to the row, every row of an even block the sum from after the row to its block's end:

        i in an odd block, j in the even block before it:  gc_i - gc_j = level_i + level_j

    Both terms are <= 0 and cover only tokens in (j, i]: nothing overflows, nothing cancels after
    a strong decay, and no later gate is read.
    """
    size = g.shape[0]
    prefix, suffix, total = g, jnp.zeros_like(g), g  # [C, K] each, for blocks of one row
    levels = []
    half = 1
    while half < size:
        odd = _odd_rows(size, half)  # [C, 1]
        levels.append(jnp.where(odd, prefix, suffix))  # [C, K]
        sibling = arithmetic.swap_siblings(total, half)  # [C, K]
        prefix = jnp.where(odd, prefix + sibling, prefix)
        suffix = jnp.where(odd, suffix, suffix + sibling)
        total = total + sibling
        half *= 2
    return Decays(tuple(levels), prefix, suffix, total[:1])


def local_decay_sums_gradient(d: Decays, arithmetic: Arithmetic) -> Array:
    """The transpose of `local_decay_sums`: cotangents of its sums -> dg [C, K].

    Equal to the reverse cumulative sum of q*dq + bk*d(bk) - k*dk, without its cancellation: g_t
    receives only the pairs that straddle t, and so stays exact beside a decay of -1736.
    """
    size = d.prefix.shape[0]
    d_prefix, d_suffix = d.prefix, d.suffix  # [C, K]
    d_total = jnp.zeros_like(d_prefix)
    for level in reversed(range(len(d.levels))):
        half = 1 << level
        odd = _odd_rows(size, half)  # [C, 1]
        d_sibling = jnp.where(odd, d_prefix, d_suffix) + d_total  # [C, K]
        d_total = d_total + arithmetic.swap_siblings(d_sibling, half)
        d_prefix = jnp.where(odd, d_prefix + d.levels[level], d_prefix)
        d_suffix = jnp.where(odd, d_suffix, d_suffix + d.levels[level])
    return d_prefix + d_total + d.total  # total is one row: every g_t is in it


# Scores -----------------------------------------------------------------------------------------


def pair_scores(
    rows: tuple[Array, ...], k: Array, decays: Decays, arithmetic: Arithmetic
) -> tuple[Array, ...]:
    """For each x [C, K] of `rows`: sum_d x_id k_jd exp(gc_id - gc_jd) for i > j, else 0 [C, C]."""
    size, leaf = k.shape[0], min(arithmetic.leaf, k.shape[0])
    precision = arithmetic.precision.scores
    count = len(rows)
    blocks = jnp.concatenate([_blocks(x, leaf) for x in rows], -2)  # [C/n, count n, K]
    scores = jnp.zeros((*blocks.shape[:-1], leaf), jnp.float32)  # [C/n, count n, n]
    for level, half in _levels(1, leaf):
        factor = _blocks(jnp.exp(decays.levels[level]), leaf)  # [C/n, n, K]
        left = blocks * jnp.concatenate([factor] * count, -2)  # [C/n, count n, K]
        product = arithmetic.dot(left, _blocks(k, leaf) * factor, precision, "nt")
        scores = jnp.where(_pair_mask(count, leaf, half), product, scores)
    merged = [scores[..., n * leaf : (n + 1) * leaf, :] for n in range(count)]  # [C/n, n, n]
    for level, half in _levels(leaf, size):
        factor = jnp.exp(decays.levels[level])  # [C, K]
        left = jnp.concatenate([_odd(x * factor, half) for x in rows], -2)  # [P, count h, K]
        cross = arithmetic.dot(left, _even(k * factor, half), precision, "nt")
        merged = [_merge(merged[n], cross[..., n * half : (n + 1) * half, :]) for n in range(count)]
    return tuple(x.reshape(size, size) for x in merged)


class PairGradients(NamedTuple):
    """Gradients of the off-diagonal scores."""

    query: Array  # [C, K]
    erase: Array  # [C, K], to b*k as a row
    key: Array  # [C, K], to k as a column
    levels: tuple[Array, ...]  # log2(C) times [C, K], to Decays.levels


def pair_score_gradients(
    d_query_scores: Array,
    d_erase_scores: Array,
    q: Array,
    erase_keys: Array,
    k: Array,
    decays: Decays,
    arithmetic: Arithmetic,
) -> PairGradients:
    """Transpose of `pair_scores` at (q, b*k), k, from dAqk and dAkk [C, C] (only i > j is read).

    Dq_i = sum_j dAqk_ij k_j E_ij     Dkb_i = sum_j dAkk_ij k_j E_ij
    Dk_j = sum_i (dAqk_ij q_i + dAkk_ij (b*k)_i) E_ij         E_ij = exp(gc_i - gc_j)
    """
    size, leaf = k.shape[0], min(arithmetic.leaf, k.shape[0])
    d_query, d_erase, d_key = jnp.zeros_like(k), jnp.zeros_like(k), jnp.zeros_like(k)
    d_levels = []
    leaf_scores = [_diagonal_blocks(x, leaf) for x in (d_query_scores, d_erase_scores)]
    for level, half in _levels(1, size):
        factor = jnp.exp(decays.levels[level])  # [C, K]
        qf, ef, kf = q * factor, erase_keys * factor, k * factor  # [C, K]
        if half < leaf:
            mask = _pair_mask(1, leaf, half)  # [n, n]
            d_scores = [jnp.where(mask, x, 0.0) for x in leaf_scores]  # [C/n, n, n] each
            dq, de, dk = _level_gradients(
                d_scores, _blocks(qf, leaf), _blocks(ef, leaf), _blocks(kf, leaf), arithmetic
            )  # [C/n, n, K] each
            dq, de, dk = (x.reshape(k.shape) for x in (dq, de, dk))
        else:
            d_scores = [_cross_blocks(x, half) for x in (d_query_scores, d_erase_scores)]
            dq, de, dk = _level_gradients(
                d_scores, _odd(qf, half), _odd(ef, half), _even(kf, half), arithmetic
            )  # [C/2h, h, K] each
            dq, de, dk = _place(dq, 1), _place(de, 1), _place(dk, 0)
        d_query, d_erase, d_key = d_query + dq * factor, d_erase + de * factor, d_key + dk * factor
        odd = _odd_rows(size, half)  # [C, 1]
        d_levels.append(jnp.where(odd, qf * dq + ef * de, kf * dk))
    return PairGradients(d_query, d_erase, d_key, tuple(d_levels))


def _level_gradients(d_scores, query, erase, key, arithmetic):
    """One level: cotangents [.., m, n] x 2, factored rows [.., m, K] x 2, keys [.., n, K]."""
    precision = arithmetic.precision.scores
    rows = query.shape[-2]
    stacked = jnp.concatenate(d_scores, -2)  # [.., 2m, n]
    d_rows = arithmetic.dot(stacked, key, precision)  # [.., 2m, K]
    d_key = arithmetic.dot(stacked, jnp.concatenate([query, erase], -2), precision, "tn")
    return d_rows[..., :rows, :], d_rows[..., rows:, :], d_key


# Inverse ----------------------------------------------------------------------------------------


def invert_unit_lower(lower: Array, arithmetic: Arithmetic) -> Array:
    """(I + lower)^-1 for a strictly lower triangular [C, C], by a ladder of block sizes:

        [X11  0 ]^-1  has the lower left block  -X22 (L21 X11), X11 and X22 inverted before.
        [L21 X22]

    Never powers of `lower`: they reach 1e+9 for keys that point the same way, where the inverse
    itself stays near 1.
    """
    size, leaf = lower.shape[0], min(arithmetic.leaf, lower.shape[0])
    precision = arithmetic.precision.inverse
    blocks = _diagonal_blocks(lower, leaf)  # [C/n, n, n]
    inverse = jnp.where(_identity(leaf), 1.0, -jnp.where(_pair_mask(1, leaf, 1), blocks, 0.0))
    for _, half in _levels(2, leaf):
        cross = jnp.where(_pair_mask(1, leaf, half), blocks, 0.0)  # [C/n, n, n]
        right = arithmetic.dot(cross, inverse, precision)
        inverse = inverse - arithmetic.dot(inverse, right, precision)
    for _, half in _levels(leaf, size):
        pairs = inverse.reshape(size // (2 * half), 2, half, half)
        upper, under = pairs[:, 0], pairs[:, 1]  # [C/2h, h, h] X11, X22
        right = arithmetic.dot(_cross_blocks(lower, half), upper, precision)
        inverse = _merge(inverse, -arithmetic.dot(under, right, precision))
    return inverse.reshape(size, size)


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
    q: Array, k: Array, g: Array, b: Array, segments: Segments | None, arithmetic: Arithmetic
) -> Prepared:
    """Decays, scores and the inverse. q [C, K] is already multiplied by the scale."""
    decays = local_decay_sums(g, arithmetic)
    erase_keys = b * k  # [C, K]
    query_scores, erase_scores = pair_scores((q, erase_keys), k, decays, arithmetic)
    query_scores = complete_query_scores(query_scores, q, k, segments)
    if segments is not None:
        erase_scores = jnp.where(segments.same, erase_scores, 0.0)
    # Rows that are not finite stay out of the ladder, whose products would spread them to earlier
    # rows (0 * NaN), and are NaN again in its result.
    broken = ~jnp.isfinite(jnp.sum(erase_scores, 1, keepdims=True))  # [C, 1]
    inverse = invert_unit_lower(jnp.where(broken, 0.0, erase_scores), arithmetic)  # [C, C]
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
    query_scores = jnp.where(_identity(q.shape[0]), diagonal, query_scores)
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
    arithmetic: Arithmetic,
) -> Array:
    """Vn = A (w*v - Kb S) [C, V]: what each token adds to the state."""
    read = arithmetic.dot(prepared.factors.erase, state, arithmetic.precision.read)  # [C, V]
    if segments is not None:
        read = jnp.where(segments.first, read, 0.0)  # 0 * NaN: the last segment's NaN ends here
    written = w * v - read  # [C, V] R
    return causal_dot(prepared.inverse, written, segments, arithmetic.precision.solve, arithmetic)


def forward(
    state: Array,
    v: Array,
    w: Array,
    prepared: Prepared,
    segments: Segments | None,
    arithmetic: Arithmetic,
) -> tuple[Array, Array]:
    """O = Qt S + Aqk Vn [C, V] and S' = Diag(exp gc_last) S + Kg^T Vn [K, V]."""
    factors, precision = prepared.factors, arithmetic.precision
    new_values = solve(state, v, w, prepared, segments, arithmetic)  # [C, V] Vn
    read = arithmetic.dot(factors.query, state, precision.read)  # [C, V]
    decayed = state * factors.decay.T  # [K, V]
    written = new_values
    if segments is not None:
        read = jnp.where(segments.first, read, 0.0)
        decayed = jnp.where(segments.carried, decayed, 0.0)
        written = jnp.where(segments.last, new_values, 0.0)
    o = read + causal_dot(prepared.query_scores, new_values, segments, precision.output, arithmetic)
    return o, decayed + arithmetic.dot(factors.key, written, precision.update, "tn")


def causal_dot(
    lower: Array, x: Array, segments: Segments | None, precision: str, arithmetic: Arithmetic
) -> Array:
    """lower [C, C] @ x [C, V], where a non-finite x_j reaches the rows i >= j of its segment only.

    The plain product would hand it to every row, as 0 * NaN. The rows that it must reach are
    found by a product of the mask with the places of the non-finite values (0 and 1: exact in
    one bfloat16 pass).
    """
    size = lower.shape[0]
    rows, columns = _row_numbers(size, size), _column_numbers(size, size)
    reaches = rows >= columns  # [C, C]
    if segments is not None:
        reaches = reaches & segments.same
    broken = ~jnp.isfinite(x)  # [C, V]
    hits = arithmetic.dot(reaches.astype(jnp.float32), broken.astype(jnp.float32), "bf16")
    product = arithmetic.dot(lower, jnp.where(broken, 0.0, x), precision)  # [C, V]
    return jnp.where(hits > 0.0, jnp.nan, product)


# Backward ---------------------------------------------------------------------------------------


def backward_values(
    d_state: Array, d_o: Array, prepared: Prepared, arithmetic: Arithmetic
) -> tuple[Array, Array]:
    """dR = A^T (Aqk^T dO + Kg dS') [C, V], and dS = Diag(exp gc_last) dS' + Qt^T dO - Kb^T dR."""
    factors, precision = prepared.factors, arithmetic.precision
    d_new_values = arithmetic.dot(
        prepared.query_scores, d_o, precision.output, "tn"
    ) + arithmetic.dot(factors.key, d_state, precision.update)  # [C, V] dVn
    d_written = arithmetic.dot(prepared.inverse, d_new_values, precision.solve, "tn")  # [C, V] dR
    d_state = (
        d_state * factors.decay.T
        + arithmetic.dot(factors.query, d_o, precision.read, "tn")
        - arithmetic.dot(factors.erase, d_written, precision.read, "tn")
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
    arithmetic: Arithmetic,
) -> Inputs:
    """The six input gradients; d_state is dS' [K, V], state S [K, V].

    dAqk = tril(dO Vn^T)   dAkk = -stril(dR Vn^T)   (no A^T dA A^T is needed)
    dv = dR*w   dw = dR*v   dKb = -dR S^T   dQt = dO S^T   dKg = Vn dS'^T
    dq = dQt exp(gc) + Dq   d(bk) = dKb exp(gc) + Dkb   dk = d(bk)*b + dKg exp(..) + Dk
    db = d(bk)*k            dg: see local_decay_sums_gradient
    """
    q, k, v, _, b, w = inputs
    erase_keys, precision = b * k, arithmetic.precision
    d_scores = arithmetic.dot(
        jnp.concatenate([d_o, -d_written], 0), new_values, precision.pairs, "nt"
    )  # [2C, C]
    size = k.shape[0]
    d_query_scores, d_erase_scores = d_scores[:size], d_scores[size:]  # [C, C]
    if segments is not None:
        d_query_scores = jnp.where(segments.same, d_query_scores, 0.0)
        d_erase_scores = jnp.where(segments.same, d_erase_scores, 0.0)
    diagonal = jnp.where(_identity(size), d_query_scores, 0.0).sum(1, keepdims=True)  # [C, 1]
    pairs = pair_score_gradients(
        d_query_scores, d_erase_scores, q, erase_keys, k, decays, arithmetic
    )

    d_reads = arithmetic.dot(
        jnp.concatenate([d_o, -d_written], 0), state, precision.read, "nt"
    )  # [2C, K] dQt, dKb
    d_query_factor, d_erase_factor = d_reads[:size], d_reads[size:]  # [C, K]
    d_key_factor = arithmetic.dot(new_values, d_state, precision.update, "nt")  # [C, K] dKg
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
        ),
        arithmetic,
    )  # [C, K]
    return Inputs(d_q, d_k, d_written * w, d_g, d_erase_keys * k, d_written * v)


# Blocks -----------------------------------------------------------------------------------------


def _levels(start: int, stop: int) -> list[tuple[int, int]]:
    """(level, half) for the half sizes start, 2 start, .. below stop, all powers of two."""
    return [(n, 1 << n) for n in range(start.bit_length() - 1, stop.bit_length() - 1)]


def _row_numbers(rows: int, columns: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 0)


def _column_numbers(rows: int, columns: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 1)


def _identity(size: int) -> Array:
    return _row_numbers(size, size) == _column_numbers(size, size)


def _odd_rows(size: int, half: int) -> Array:
    """[C, 1] bool: the row lies in an odd block of `half` rows."""
    return (_row_numbers(size, 1) & half) != 0


def _pair_mask(count: int, size: int, half: int) -> Array:
    """[count * n, n] bool, `count` copies: row in an odd block, column in the even one before."""
    i = _row_numbers(count * size, size) & (size - 1)
    j = _column_numbers(count * size, size)
    return ((i & half) != 0) & ((j & half) == 0) & ((i ^ j) < 2 * half)


def _blocks(x: Array, rows: int) -> Array:
    """[C, N] -> [C/rows, rows, N], or x itself when it is one block."""
    return x if rows == x.shape[0] else x.reshape(x.shape[0] // rows, rows, x.shape[1])


def _even(x: Array, half: int) -> Array:
    """[C, N] -> [C/2h, h, N], the even blocks."""
    return x.reshape(x.shape[0] // (2 * half), 2, half, x.shape[1])[:, 0]


def _odd(x: Array, half: int) -> Array:
    """[C, N] -> [C/2h, h, N], the odd blocks."""
    return x.reshape(x.shape[0] // (2 * half), 2, half, x.shape[1])[:, 1]


def _place(x: Array, parity: int) -> Array:
    """[C/2h, h, N] -> [C, N] in the even (0) or odd (1) blocks, zeros in the others."""
    pairs = [x, jnp.zeros_like(x)] if parity == 0 else [jnp.zeros_like(x), x]
    return jnp.stack(pairs, 1).reshape(-1, x.shape[-1])


def _diagonal_blocks(x: Array, rows: int) -> Array:
    """[C, C] -> [C/rows, rows, rows], or x itself when it is one block."""
    if rows == x.shape[0]:
        return x
    starts = range(0, x.shape[0], rows)
    return jnp.stack([x[at : at + rows, at : at + rows] for at in starts])


def _cross_blocks(x: Array, half: int) -> Array:
    """[C, C] -> [C/2h, h, h]: rows of each odd block, columns of the even block before it."""
    starts = range(0, x.shape[0], 2 * half)
    return jnp.stack([x[at + half : at + 2 * half, at : at + half] for at in starts])


def _merge(diagonal: Array, cross: Array) -> Array:
    """[2P, h, h] diagonal and [P, h, h] cross blocks -> [P, 2h, 2h], zero above."""
    half = cross.shape[-1]
    pairs = diagonal.reshape(-1, 2, half, half)
    upper = jnp.concatenate([pairs[:, 0], jnp.zeros_like(cross)], -1)  # [P, h, 2h]
    return jnp.concatenate([upper, jnp.concatenate([cross, pairs[:, 1]], -1)], -2)
