# SPDX-License-Identifier: Apache-2.0
"""Products of pairs of tokens inside a chunk, weighted by the decay between them; the inverse.

    scores(x)_ij = sum_d x_id k_jd E_ijd    i > j,   E_ij = exp(gc_i - gc_j) = exp(e_i + e_j)

Level by level (`decay`), the factor exp(e) is <= 1 on either side, and a product of the factored
rows with the factored keys gives all pairs of the level: inside a leaf of LEAF_ROWS rows all
levels at once and masked, between leaves one product of half blocks a level.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2.arithmetic import DotPrecision, dot
from atomic_kernels.gdn2.decay import Decays, half_sizes

# Masked products inside a leaf waste all but one pair in 2 * log2(rows); products of half blocks
# below 16 rows are too small for any processor.
LEAF_ROWS = 16
# XLA on a CPU fuses factors and accumulated gradients into each of their readers, and so computes
# them once a reader and level. The optimization barriers below keep them as arrays, from jax 0.11
# on: forward + backward at (1, 2048, 4, 128) took 234 ms without and 136 ms with them.


def pair_scores(
    rows: tuple[Array, ...], k: Array, decays: Decays, precision: DotPrecision
) -> tuple[Array, ...]:
    """scores(x) [C, C], zero for i <= j, for each x [C, K] of `rows`."""
    size, leaf, count = k.shape[0], LEAF_ROWS, len(rows)
    factors = _leaf_factors(decays)  # [L, C/n, n, K]
    left = jnp.concatenate([_blocks(x, leaf) * factors for x in rows], -2)  # [L, C/n, count n, K]
    products = dot(left, _blocks(k, leaf) * factors, precision.near_scores, "nt")
    masks = jnp.concatenate([_leaf_masks()] * count, -2)  # [L, 1, count n, n]
    products = jnp.where(masks, products, 0.0).sum(0)  # [C/n, count n, n], one level a pair
    scores = jnp.split(products, count, -2)  # count times [C/n, n, n]
    for half in half_sizes(leaf, size):
        factor = lax.optimization_barrier(jnp.exp(decays.levels[half.bit_length() - 1]))  # [C, K]
        left = jnp.concatenate([_odd(x * factor, half) for x in rows], -2)  # [P, count h, K]
        cross = dot(left, _even(k * factor, half), precision.far_scores, "nt")  # [P, count h, h]
        scores = [_merge(x, y) for x, y in zip(scores, jnp.split(cross, count, -2), strict=True)]
    return tuple(x.reshape(size, size) for x in scores)


class PairGradients(NamedTuple):
    """Gradients through the scores of two rows, q and b*k."""

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
    precision: DotPrecision,
) -> PairGradients:
    """The transpose of `pair_scores`, from dAqk and dAkk [C, C]; only i > j of them is used.

    Dq_i = sum_j dAqk_ij k_j E_ij     Dkb_i = sum_j dAkk_ij k_j E_ij
    Dk_j = sum_i (dAqk_ij q_i + dAkk_ij (b*k)_i) E_ij
    """
    size, leaf = k.shape[0], LEAF_ROWS
    gradient = _near_gradients(
        d_query_scores, d_erase_scores, q, erase_keys, k, decays, precision.near_scores
    )
    for half in half_sizes(leaf, size):
        factor = lax.optimization_barrier(jnp.exp(decays.levels[half.bit_length() - 1]))  # [C, K]
        qf, ef, kf = q * factor, erase_keys * factor, k * factor  # [C, K]
        d_scores = jnp.concatenate(
            [_cross_blocks(x, half) for x in (d_query_scores, d_erase_scores)], -2
        )  # [P, 2h, h]
        left = jnp.concatenate([_odd(qf, half), _odd(ef, half)], -2)  # [P, 2h, K]
        d_rows = dot(d_scores, _even(kf, half), precision.far_scores)  # [P, 2h, K]
        dk = _place(dot(d_scores, left, precision.far_scores, "tn"), odd=False)  # [C, K]
        dq, de = (_place(x, odd=True) for x in jnp.split(d_rows, 2, -2))  # [C, K]
        gradient = lax.optimization_barrier(
            PairGradients(
                gradient.query + dq * factor,
                gradient.erase + de * factor,
                gradient.key + dk * factor,
                (*gradient.levels, qf * dq + ef * de + kf * dk),  # odd rows, odd rows, even rows
            )
        )
    return gradient


def _near_gradients(
    d_query_scores: Array,
    d_erase_scores: Array,
    q: Array,
    erase_keys: Array,
    k: Array,
    decays: Decays,
    precision: str,
) -> PairGradients:
    """The part of the pairs inside a leaf."""
    leaf = LEAF_ROWS
    factors = _leaf_factors(decays)  # [L, C/n, n, K]
    qf, ef, kf = (_blocks(x, leaf) * factors for x in (q, erase_keys, k))  # [L, C/n, n, K]
    masks = _leaf_masks()  # [L, 1, n, n]
    d_scores = jnp.concatenate(
        [
            jnp.where(masks, _diagonal_blocks(x, leaf), 0.0)
            for x in (d_query_scores, d_erase_scores)
        ],
        -2,
    )  # [L, C/n, 2n, n]
    dq, de = jnp.split(dot(d_scores, kf, precision), 2, -2)  # [L, C/n, n, K]
    dk = dot(d_scores, jnp.concatenate([qf, ef], -2), precision, "tn")  # [L, C/n, n, K]
    # In a level, dq and de are zero in even rows and dk in odd ones: the masks saw to it.
    d_levels = (qf * dq + ef * de + kf * dk).reshape(-1, *k.shape)  # [L, C, K]
    dq, de, dk = ((x * factors).sum(0).reshape(k.shape) for x in (dq, de, dk))  # [C, K]
    return PairGradients(dq, de, dk, tuple(d_levels))


def invert_unit_lower(lower: Array, precision: str) -> Array:
    """(I + lower)^-1 for a strictly lower triangular [C, C], by a ladder of block sizes:

        [X11  0 ]^-1  has the lower left block  -X22 (L21 X11), X11 and X22 inverted before.
        [L21 X22]

    Never powers of `lower`: they reach 1e+9 for keys that point the same way, where the inverse
    itself stays near 1.
    """
    size, leaf = lower.shape[0], LEAF_ROWS
    blocks = _diagonal_blocks(lower, leaf)  # [C/n, n, n]
    inverse = jnp.where(identity(leaf), 1.0, -jnp.where(_pair_mask(1), blocks, 0.0))
    for half in half_sizes(2, leaf):
        cross = jnp.where(_pair_mask(half), blocks, 0.0)  # [C/n, n, n]
        inverse = inverse - dot(inverse, dot(cross, inverse, precision), precision)
    for half in half_sizes(leaf, size):
        pairs = inverse.reshape(size // (2 * half), 2, half, half)
        upper, under = pairs[:, 0], pairs[:, 1]  # [P, h, h] X11, X22
        right = dot(_cross_blocks(lower, half), upper, precision)
        inverse = _merge(inverse, -dot(under, right, precision))
    return inverse.reshape(size, size)


def row_numbers(size: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (size, size), 0)


def column_numbers(size: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (size, size), 1)


def identity(size: int) -> Array:
    """[size, size] bool."""
    return row_numbers(size) == column_numbers(size)


def _leaf_factors(decays: Decays) -> Array:
    """exp(e) of the levels inside a leaf [L, C/n, n, K]."""
    levels = decays.levels[: LEAF_ROWS.bit_length() - 1]
    return lax.optimization_barrier(jnp.exp(jnp.stack([_blocks(x, LEAF_ROWS) for x in levels])))


def _leaf_masks() -> Array:
    """[L, 1, n, n] bool: the pairs of each level."""
    return jnp.stack([_pair_mask(half) for half in half_sizes(1, LEAF_ROWS)])[:, None]


def _pair_mask(half: int) -> Array:
    """[n, n] bool: row in an odd block of `half` rows, column in the even one before it."""
    i, j = row_numbers(LEAF_ROWS), column_numbers(LEAF_ROWS)
    return ((i & half) != 0) & ((j & half) == 0) & ((i ^ j) < 2 * half)


def _blocks(x: Array, rows: int) -> Array:
    """[C, N] -> [C/rows, rows, N]."""
    return x.reshape(x.shape[0] // rows, rows, x.shape[1])


def _even(x: Array, half: int) -> Array:
    """[C, N] -> [C/2h, h, N], the even blocks."""
    return x.reshape(x.shape[0] // (2 * half), 2, half, x.shape[1])[:, 0]


def _odd(x: Array, half: int) -> Array:
    """[C, N] -> [C/2h, h, N], the odd blocks."""
    return x.reshape(x.shape[0] // (2 * half), 2, half, x.shape[1])[:, 1]


def _place(x: Array, *, odd: bool) -> Array:
    """[C/2h, h, N] -> [C, N] in the odd or the even blocks, zeros in the others."""
    zeros = jnp.zeros_like(x)
    return jnp.stack([zeros, x] if odd else [x, zeros], 1).reshape(-1, x.shape[-1])


def _diagonal_blocks(x: Array, rows: int) -> Array:
    """[C, C] -> [C/rows, rows, rows]."""
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
