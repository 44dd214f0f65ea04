# SPDX-License-Identifier: Apache-2.0
"""The decay between the tokens of a chunk, level by level, and the way back.

With the decay factor e_t = exp(g_t) <= 1 [K], the pair of tokens i > j has the factor
E_ij = e_{j+1} .. e_i, and levels with half sizes h = 1, 2, .. C/2 share it out: i and j differ
first in bit h, i in the upper half of a block of 2h tokens, j in the lower one, and

    E_ij = (product from the upper half's start to i) (product from after j to the lower half's end)

Rows that have taken part in all levels below h carry their product, so a level is

    s_ij = x_i . k_j       x in the upper half, k in the lower half            [one product]
    x <- x T_lower         upper half: T = product of e over a half block
    k <- k T_upper         lower half

starting from x = q e and (b k) e, and k. After the last level x = q exp(gc) and
k = k exp(gc_last - gc). Every factor is <= 1, no later gate is read, no exponent is a difference
of long sums (one token of -1736 nats would cost 4.5e-2 of the small decays beside it), and a strong
decay is a plain zero. A segment starts at t when e_t is set to 0.

The way back undoes a level at a time, from the widest. With ds the gradient of a level's scores,

    Dx_i = sum_j ds_ij k_j        Dk_j = sum_i ds_ij x_i
    dx <- dx T_lower + Dx  (upper half)     dk <- dk T_upper + Dk  (lower half)

A log decay g_t lies in the products of those upper rows i >= t and lower keys j < t of a level
whose half block it shares:  dg_t = sum over i of x_i*Dx_i + sum over j of k_j*Dk_j.
With gc the sum over all of them would be one reverse cumulative sum, of terms that cancel: after
a strong decay nothing would be left of dg but rounding. These products use the rounded x and k
that were multiplied, so that what a level's rows get and its keys get are the same sums.

Arrays here are *by steps*: `width` rows hold one token of each of `width` runs of tokens, row
width * r + s the token r of run s. The XLA backend has one run, the chunk in order (width 1); the
TPU kernels have eight, so that a step is a register (`tpu_layout`), and levels between runs beside
these (`tpu_chunk`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from atomic_kernels.gdn2.arithmetic import NN, NT, TN, Operand, dot


def upper(x: Array, half: int) -> Array:
    """The rows of x [R, D] in the upper half of their block of 2 half rows: [R/2, D]."""
    return _halves(x, half)[:, 1].reshape(-1, x.shape[1])


def lower(x: Array, half: int) -> Array:
    """Those in the lower half."""
    return _halves(x, half)[:, 0].reshape(-1, x.shape[1])


def interleave(low: Array, high: Array, half: int) -> Array:
    """The x [R, D] with these lower and upper rows."""
    shape = (-1, 1, half, low.shape[1])
    return jnp.concatenate([low.reshape(shape), high.reshape(shape)], 1).reshape(-1, low.shape[1])


def add_upper(x: Array, y: Array, half: int) -> Array:
    """x [R, D] plus y [R/2, D] in its upper rows."""
    return interleave(lower(x, half), upper(x, half) + y, half)


def add_lower(x: Array, y: Array, half: int) -> Array:
    """x [R, D] plus y [R/2, D] in its lower rows."""
    return interleave(lower(x, half) + y, upper(x, half), half)


def _halves(x: Array, half: int) -> Array:
    return x.reshape(x.shape[0] // (2 * half), 2, half, x.shape[1])


def block_totals(decay: Array, width: int) -> list[Array]:
    """Products of the decays [C, K] over blocks of 1, 2, .. C / width steps: C, C/2, .. width
    rows; the last are the products of whole runs."""
    totals = [decay]
    while totals[-1].shape[0] > width:
        total = totals[-1]
        totals.append(lower(total, width) * upper(total, width))
    return totals


def repeat_steps(total: Array, count: int, width: int) -> Array:
    """Each step of total [R, K] `count` times: [R count, K]."""
    steps = total.reshape(-1, 1, width, total.shape[1])
    shape = (steps.shape[0], count, *steps.shape[2:])
    return jnp.broadcast_to(steps, shape).reshape(-1, total.shape[1])


def climb_rows(x: Array, totals: list[Array], level: int, width: int) -> Array:
    """x T_lower in the upper half of a level's blocks; x [C, K]."""
    half = width << level
    factor = repeat_steps(lower(totals[level], width), 1 << level, width)
    return interleave(lower(x, half), upper(x, half) * factor, half)


def climb_keys(k: Array, totals: list[Array], level: int, width: int) -> Array:
    """k T_upper in the lower half of a level's blocks; k [C, K]."""
    half = width << level
    factor = repeat_steps(upper(totals[level], width), 1 << level, width)
    return interleave(lower(k, half) * factor, upper(k, half), half)


def level_mask(shape: tuple[int, int], half: int, width: int, run: int) -> Array:
    """bool [C/2, C] for the upper steps of a level: which columns, tokens in order, are their
    pairs. `run` tokens a run; half in tokens."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    step = nth_upper(row >> (width.bit_length() - 1), half)
    return is_pair((row & (width - 1)) * run + step, column, half)


def nth_upper(n: Array, half: int) -> Array:
    """The n-th number that has bit `half` set."""
    return ((n & ~(half - 1)) << 1) | half | (n & (half - 1))


def is_pair(token: Array, column: Array, half: int) -> Array:
    """Whether the column's token is in the lower half before the token's own."""
    return ((token ^ column) < 2 * half) & ((column & half) == 0)


def place_upper(scores: Array, level_scores: Array, mask: Array, half: int) -> Array:
    """scores [R, N] with those of a level [R/2, N], where mask is, in its upper rows."""
    rows = jnp.where(mask, level_scores, upper(scores, half))
    return interleave(lower(scores, half), rows, half)


def level_scores(left: Operand, right: Operand) -> Array:
    """x_i . k_j [.., R, N] of all x in left [.., R, K] and k in right [.., N, K]; a level's mask
    chooses its pairs."""
    return dot(left, right, NT)


def level_gradients(d_scores: Operand, left: Operand, right: Operand) -> tuple[Array, Array]:
    """Dx [.., R, K] and Dk [.., N, K] of x in left [.., R, K], k in right [.., N, K] and the masked
    gradients of their scores [.., R, N]."""
    return dot(d_scores, right, NN), dot(d_scores, left, TN)


class LevelGradient(NamedTuple):
    """What one level gives: [C/2, K] each, of its upper rows or its lower keys."""

    query: Array  # Dx of q
    erase: Array  # Dx of b k
    key: Array  # Dk
    rows: Array  # x*Dx, both
    keys: Array  # k*Dk


class Undone(NamedTuple):
    """The gradients when all levels from the widest to one of them are undone."""

    query: Array  # [C, K] dx of q
    erase: Array  # [C, K] dx of b k
    key: Array  # [C, K] dk
    rows: Array  # [C, K] x*Dx, summed over levels
    keys: Array  # [C, K] k*Dk
    decay: Array  # [R, K] what every log decay of a block gets, a block a step


def undo_level(
    done: Undone, found: LevelGradient, totals: list[Array], level: int, width: int
) -> Undone:
    """One level more; at last `rows` + `decay` is dg: a block of one token, whose row's product has
    its own decay in it and whose key's has none."""
    half = width << level
    return Undone(
        add_upper(climb_rows(done.query, totals, level, width), found.query, half),
        add_upper(climb_rows(done.erase, totals, level, width), found.erase, half),
        add_lower(climb_keys(done.key, totals, level, width), found.key, half),
        add_upper(done.rows, found.rows, half),
        add_lower(done.keys, found.keys, half),
        pass_down(done.decay, done.rows, done.keys, level, width),
    )


def pass_down(to_all: Array, rows: Array, keys: Array, level: int, width: int) -> Array:
    """What the decays of each half block get from all of their block: to_all has a step a block,
    the result a step a half block; rows, keys [C, K].

    A row's product starts at the block's start: an upper row's covers the whole lower half. A
    key's ends at the block's end: a lower key's covers the whole upper half. So rows' sum over
    the upper half falls on the lower one, keys' sum over the lower half on the upper one.
    """
    half, count = width << level, 1 << level
    to_lower = to_all + step_sums(upper(rows, half), count, width)
    to_upper = to_all + step_sums(lower(keys, half), count, width)
    return interleave(to_lower, to_upper, width)


def step_sums(x: Array, count: int, width: int) -> Array:
    """Sum over each `count` consecutive steps of x [R, K]: [R / count, K]."""
    while count > 1:
        x, count = lower(x, width) + upper(x, width), count // 2
    return x
