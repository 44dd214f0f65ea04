# SPDX-License-Identifier: Apache-2.0
"""The products of pairs of tokens, and the inverse, in blocks of a chunk: the XLA backend's.

A level (`levels`) of half size h is one product a block: of blocks of LEAF_ROWS tokens, masked,
where 2h is not more, else of blocks of 2h, upper rows with lower keys. Here C tokens in order,
n = LEAF_ROWS, P blocks of u upper rows, N keys a block.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2.arithmetic import Operand, Rounding, join
from atomic_kernels.gdn2.chunk import ladder_cross, ladder_middle
from atomic_kernels.gdn2.levels import (
    LevelGradient,
    climb_keys,
    climb_rows,
    is_pair,
    level_gradients,
    level_mask,
    level_scores,
    lower,
    place_upper,
    upper,
)

# Masked products inside a leaf waste all but one pair in 2 * log2(rows); products of half blocks
# below 16 rows are too small for any processor.
LEAF_ROWS = 16
WIDTH = 1  # rows a step: a chunk in order is one run
# XLA on a CPU fuses operands and accumulated gradients into each of their readers, and so computes
# them once a reader and level. The optimization barriers keep them as arrays, from jax 0.11 on.


class Level(NamedTuple):
    """The operands of one level."""

    left: Operand  # [P, 2u, K] upper rows of q e .., then of (b k) e ..
    right: Operand  # [P, N, K] keys


def level_operands(
    query: Array, erase: Array, key: Array, totals: list[Array], rounding: Rounding
) -> tuple[list[Level], Array, Array, Array]:
    """The levels, narrowest first, and Qt, Kb, Kg [C, K], from q e, (b k) e and k."""
    levels = []
    for number in range(len(totals) - 1):
        half = 1 << number
        block = max(2 * half, LEAF_ROWS)
        rows = [_blocks(upper(x, half), block // 2) for x in (query, erase)]  # [P, u, K]
        left = rounding.coarse(jnp.concatenate(rows, 1))
        # Identical keys round alike; in a level of many columns those errors are a sum.
        right = (
            rounding.coarse(_blocks(key, block))
            if block == LEAF_ROWS
            else rounding.fine(_blocks(lower(key, half), half))
        )
        levels.append(lax.optimization_barrier(Level(left, right)))
        query, erase = (climb_rows(x, totals, number, WIDTH) for x in (query, erase))
        key = climb_keys(key, totals, number, WIDTH)
    return levels, query, erase, key


def pair_scores(levels: list[Level], count: int) -> list[Array]:
    """Aqk, and Akk if count is 2, [C, C], zero for i <= j."""
    leaves: list[Array] = []  # [C, n]
    blocks: list[Array] = []  # [P, 2h, 2h]
    for number, (left, right) in enumerate(levels):
        half = 1 << number
        rows = left[0].shape[1] // 2 * count
        products = level_scores(tuple(x[:, :rows] for x in left), right)  # [P, count u, N]
        found = jnp.split(products, count, 1)  # [P, u, N]
        if 2 * half > LEAF_ROWS:
            blocks = [_merge(x, y) for x, y in zip(blocks, found, strict=True)]
            continue
        mask = _leaf_mask(half, products.shape[0])  # [C/2, n]
        found = [x.reshape(-1, LEAF_ROWS) for x in found]  # [C/2, n]
        leaves = leaves or [jnp.zeros((2 * x.shape[0], LEAF_ROWS)) for x in found]
        leaves = [place_upper(x, y, mask, half) for x, y in zip(leaves, found, strict=True)]
        blocks = [_blocks(x, LEAF_ROWS) for x in leaves]
    return [x[0] for x in blocks]


def pair_gradients(
    level: Level, number: int, d_query_scores: Array, d_erase_scores: Array, rounding: Rounding
) -> LevelGradient:
    """What level `number` gives, from dAqk and dAkk [C, C]; only i > j of them is used."""
    half = 1 << number
    near = 2 * half <= LEAF_ROWS
    chosen = [
        _leaf_pairs(x, half) if near else _cross_blocks(x, half)
        for x in (d_query_scores, d_erase_scores)
    ]  # [P, u, N]
    left, right = (rounding.coarse(x) for x in level)
    d_scores = rounding.coarse(jnp.concatenate(chosen, 1))
    d_rows, d_keys = level_gradients(d_scores, left, right)  # [P, 2u, K], [P, N, K]
    width = d_keys.shape[-1]
    query, erase = (x.reshape(-1, width) for x in jnp.split(d_rows, 2, 1))  # [C/2, K]
    products = [x.reshape(-1, width) for x in jnp.split(join(left) * d_rows, 2, 1)]
    keys = [x.reshape(-1, width) for x in (d_keys, join(right) * d_keys)]
    if near:
        keys = [lower(x, half) for x in keys]
    return LevelGradient(query, erase, keys[0], products[0] + products[1], keys[1])


def invert_unit_lower(scores: Array, rounding: Rounding) -> Array:
    """A = (I + L)^-1 [C, C] for a strictly lower triangular L, from blocks of 1, 2, 4 .. tokens."""
    leaves = _diagonal_blocks(scores)  # [C/n, n, n]
    row, column = (lax.broadcasted_iota(jnp.int32, leaves.shape[1:], axis) for axis in (0, 1))

    def pairs_of(half):
        return jnp.where(((row & half) != 0) & is_pair(row, column, half), leaves, 0.0)

    inverse = jnp.where(row == column, 1.0, -pairs_of(1))
    half = 2
    while half < LEAF_ROWS:
        middle = ladder_middle(pairs_of(half), inverse, rounding)
        inverse = inverse + ladder_cross(inverse, middle, rounding)
        half *= 2
    while half < scores.shape[0]:
        pairs = inverse.reshape(-1, 2, half, half)
        middle = ladder_middle(_cross_blocks(scores, half), pairs[:, 0], rounding)  # [P, h, h]
        inverse = _merge(inverse, ladder_cross(pairs[:, 1], middle, rounding))
        half *= 2
    return inverse[0]


def _leaf_mask(half: int, blocks: int) -> Array:
    """[C/2, n] bool, for the upper rows of a level: which columns of their leaf are their pairs."""
    mask = level_mask((LEAF_ROWS // 2, LEAF_ROWS), half, WIDTH, LEAF_ROWS)
    return jnp.tile(mask, (blocks, 1))


def _leaf_pairs(d_scores: Array, half: int) -> Array:
    """[C, C] -> [P, n/2, n]: the leaves' upper rows of a level, zero but at its pairs."""
    leaves = _diagonal_blocks(d_scores)
    rows = upper(leaves.reshape(-1, LEAF_ROWS), half)  # [C/2, n]
    return _blocks(jnp.where(_leaf_mask(half, leaves.shape[0]), rows, 0.0), LEAF_ROWS // 2)


def _blocks(x: Array, rows: int) -> Array:
    """[R, N] -> [R/rows, rows, N]."""
    return x.reshape(x.shape[0] // rows, rows, x.shape[1])


def _diagonal_blocks(x: Array) -> Array:
    """[C, C] -> [C/n, n, n]."""
    starts = range(0, x.shape[0], LEAF_ROWS)
    return jnp.stack([x[at : at + LEAF_ROWS, at : at + LEAF_ROWS] for at in starts])


def _cross_blocks(x: Array, half: int) -> Array:
    """[C, C] -> [C/2h, h, h]: rows of each upper half, columns of the lower half before it."""
    starts = range(0, x.shape[0], 2 * half)
    return jnp.stack([x[at + half : at + 2 * half, at : at + half] for at in starts])


def _merge(diagonal: Array, cross: Array) -> Array:
    """[2P, h, h] diagonal and [P, h, h] cross blocks -> [P, 2h, 2h], zero above."""
    half = cross.shape[-1]
    pairs = diagonal.reshape(-1, 2, half, half)
    above = jnp.concatenate([pairs[:, 0], jnp.zeros_like(cross)], -1)  # [P, h, 2h]
    return jnp.concatenate([above, jnp.concatenate([cross, pairs[:, 1]], -1)], -2)
