# SPDX-License-Identifier: Apache-2.0
"""Sums of log decays over the blocks of a chunk, and blocks of rows in general.

gc_i - gc_j, the decay between two tokens, taken as a difference of chunk-long sums loses what
small gates contribute beside a large one (one token of -1736 nats: 4.5e-2 relative in float32).
Here every decay is a sum of the gates between the two tokens: for half sizes h = 1, 2, 4 .. C/2,

    i in an odd block of h rows, j in the even block before it:  gc_i - gc_j = e_i + e_j
    e_i = sum of g from i's block's start to i       e_j = sum of g after j to its block's end

Each pair i > j is in exactly one level. Both terms are <= 0, so nothing overflows; no gate after i
is read, so nothing leaks from the future; nothing is subtracted, so nothing cancels. The gradient
has the same property: g_t receives the pairs i >= t > j only, where a reverse cumulative sum of
q*dq + (b*k)*d(b*k) - k*dk would have to cancel all the others.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2.arithmetic import dot


class Decays(NamedTuple):
    """Sums of g [C, K] in nats, or their cotangents."""

    levels: tuple[Array, ...]  # log2(C) times [C, K], level n for blocks of h = 2^n rows
    prefix: Array  # [C, K] over 0 .. i
    suffix: Array  # [C, K] over i + 1 .. C - 1
    total: Array  # [1, K]


def local_decay_sums(g: Array) -> Decays:
    """All sums from g [C, K] by doubling the blocks log2(C) times; C is a power of two."""
    size, width = g.shape
    prefix, suffix, totals = g, jnp.zeros_like(g), g  # [C, K], [C, K], [C/h, K] for h = 1
    levels = []
    for half in half_sizes(1, size):
        levels.append(jnp.where(odd_rows(size, half), prefix, suffix))  # [C, K]
        even, odd = _pairs(totals)  # [C/2h, 1, K] each
        zero = jnp.zeros_like(even)
        prefix = _by_half_blocks(prefix, half) + jnp.stack([zero, even], 1)  # [C/2h, 2, h, K]
        suffix = _by_half_blocks(suffix, half) + jnp.stack([odd, zero], 1)  # [C/2h, 2, h, K]
        prefix, suffix = prefix.reshape(size, width), suffix.reshape(size, width)
        totals = (even + odd)[:, 0]  # [C/2h, K]
    return Decays(tuple(levels), prefix, suffix, totals)


def local_decay_sums_gradient(d: Decays) -> Array:
    """The transpose of `local_decay_sums`: cotangents of its sums -> dg [C, K].

    g_t is a term of the sums to or from all rows on one side of it: a product with a matrix of
    zeros and ones.
    """
    size = d.prefix.shape[0]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    after, before = column >= row, column < row  # [C, C]
    terms = []
    for half in half_sizes(1, size):
        block = (row // half) == (column // half)
        terms.append(block & jnp.where((row & half) != 0, after, before))
    matrix = jnp.concatenate([*terms, after, before], 1).astype(jnp.float32)
    return dot(matrix, jnp.concatenate([*d.levels, d.prefix, d.suffix], 0), "f32") + d.total


def half_sizes(start: int, stop: int) -> list[int]:
    """start, 2 start, .. below stop; both are powers of two."""
    return [1 << n for n in range(start.bit_length() - 1, stop.bit_length() - 1)]


def odd_rows(size: int, half: int) -> Array:
    """[C, 1] bool: the row lies in an odd block of `half` rows."""
    return (lax.broadcasted_iota(jnp.int32, (size, 1), 0) & half) != 0


def _pairs(blocks: Array) -> tuple[Array, Array]:
    """[2P, K] -> the even and the odd rows, [P, 1, K] each."""
    pairs = blocks.reshape(-1, 2, 1, blocks.shape[1])
    return pairs[:, 0], pairs[:, 1]


def _by_half_blocks(x: Array, half: int) -> Array:
    """[C, K] -> [C/2h, 2, h, K]."""
    return x.reshape(-1, 2, half, x.shape[1])
