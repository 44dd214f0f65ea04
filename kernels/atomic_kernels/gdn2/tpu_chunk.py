# SPDX-License-Identifier: Apache-2.0
"""One chunk of GDN-2 on a TPU: pure functions of arrays, the same equations as `chunk`.

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
of long sums, and a strong decay is a plain zero. A segment starts at t when e_t is set to 0.

Low levels (h < n = C/8) run over steps, high levels over runs; see `tpu_layout`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2.tpu_layout import (
    SUBLANES,
    Layout,
    column_numbers,
    interleave,
    lower,
    row_numbers,
    upper,
)


def block_totals(decay: Array) -> list[Array]:
    """Products of the decays [C, K], by steps, over blocks of 1, 2, .. n steps: C, C/2, .. 8
    rows, 8 a block; the last are the products of whole runs."""
    totals = [decay]
    while totals[-1].shape[0] > SUBLANES:
        total = totals[-1]
        totals.append(lower(total, SUBLANES) * upper(total, SUBLANES))
    return totals


def repeat_steps(total: Array, count: int) -> Array:
    """Each step (8 rows) of total [R, K] `count` times: [R count, K]."""
    steps = total.reshape(-1, 1, SUBLANES, total.shape[1])
    shape = (steps.shape[0], count, *steps.shape[2:])
    return jnp.broadcast_to(steps, shape).reshape(-1, total.shape[1])


def climb_rows(x: Array, totals: list[Array], level: int) -> Array:
    """x T_lower in the upper half of a level's blocks; x [C, K] by steps."""
    half = SUBLANES << level
    factor = repeat_steps(lower(totals[level], SUBLANES), 1 << level)
    return interleave(lower(x, half), upper(x, half) * factor, half)


def climb_keys(k: Array, totals: list[Array], level: int) -> Array:
    """k T_upper in the lower half of a level's blocks; k [C, K] by steps."""
    half = SUBLANES << level
    factor = repeat_steps(upper(totals[level], SUBLANES), 1 << level)
    return interleave(lower(k, half) * factor, upper(k, half), half)


def numbers(count: int, half: int, *, above: bool) -> list[int]:
    """The numbers below `count` in the upper (or lower) half of their block of 2 half."""
    return [n for n in range(count) if bool(n & half) == above]


class RunFactors(NamedTuple):
    """Decay over whole runs, for blocks of 1, 2, 4 and 8 runs (8: the chunk)."""

    before: list[Array]  # [8, K] each; row s: the runs of s's block that come before s
    after: list[Array]  # [8, K] each; row s: the runs of s's block that come after s
    total: Array  # [1, K] the whole chunk, exp(gc_last)


def run_factors(run_total: Array) -> RunFactors:
    """From the product of each run's decays [8, K]."""
    before = after = jnp.ones_like(run_total)
    total, run = run_total, row_numbers(*run_total.shape)
    factors = RunFactors([before], [after], total)
    half = 1
    while half < SUBLANES:
        is_upper = (run & half) != 0
        sibling = _swap_runs(total, half)
        before = jnp.where(is_upper, before * sibling, before)
        after = jnp.where(is_upper, after, after * sibling)
        total = total * sibling
        factors.before.append(before)
        factors.after.append(after)
        half *= 2
    return factors._replace(total=total[:1])


def scale_runs(x: Array, factor: Array) -> Array:
    """x [C, K] in order, run s times row s of factor [8, K]."""
    run = x.shape[0] // SUBLANES
    rows = [x[s * run : (s + 1) * run] * factor[s : s + 1] for s in range(SUBLANES)]
    return jnp.concatenate(rows, 0)


def run_sums(x: Array) -> Array:
    """Sum over each run of x [C, K] in order: [8, K]."""
    run = x.shape[0] // SUBLANES
    sums = [jnp.sum(x[s * run : (s + 1) * run], 0, keepdims=True) for s in range(SUBLANES)]
    return jnp.concatenate(sums, 0)


def step_sums(x: Array, count: int) -> Array:
    """Sum over each `count` consecutive steps of x [R, K]: [R / count, K]."""
    while count > 1:
        x, count = lower(x, SUBLANES) + upper(x, SUBLANES), count // 2
    return x


def pass_down_runs(to_all: Array, rows: Array, keys: Array, half: int) -> Array:
    """What the decays of each run get from all of their block of 2 half runs, [8, K] each.

    A row's product starts at the block's start: an upper row's covers the whole lower half. A
    key's ends at the block's end: a lower key's covers the whole upper half. So rows' sum over
    the upper half falls on the lower one, keys' sum over the lower half on the upper one.
    """
    run = row_numbers(*rows.shape)
    size = 1
    while size < half:
        rows, keys = rows + _swap_runs(rows, size), keys + _swap_runs(keys, size)
        size *= 2
    is_upper = (run & half) != 0
    return to_all + jnp.where(is_upper, _swap_runs(keys, half), _swap_runs(rows, half))


def pass_down_steps(to_all: Array, rows: Array, keys: Array, level: int) -> Array:
    """The same within runs: to_all, 8 rows a block, gets 8 rows a half block; rows, keys [C, K]."""
    half, count = SUBLANES << level, 1 << level
    to_lower = to_all + step_sums(upper(rows, half), count)
    to_upper = to_all + step_sums(lower(keys, half), count)
    return interleave(to_lower, to_upper, SUBLANES)


def _swap_runs(x: Array, half: int) -> Array:
    """Row s of x [8, K] from row s ^ half."""
    is_upper = (row_numbers(*x.shape) & half) != 0
    return jnp.where(is_upper, pltpu.roll(x, half, 0), pltpu.roll(x, SUBLANES - half, 0))


def low_level_mask(chunk: int, half: int) -> Array:
    """[C/2, C] for the upper steps of a level, 8 rows a step: which columns are their pairs."""
    run = chunk // SUBLANES
    row = row_numbers(chunk // 2, chunk)
    step = _nth_upper(row >> 3, half)
    return _is_pair((row & (SUBLANES - 1)) * run + step, chunk, half)


def high_level_mask(chunk: int, half_runs: int) -> Array:
    """[C/2, C] for the upper runs of a level, in order: which columns are their pairs."""
    run = chunk // SUBLANES
    bits = run.bit_length() - 1
    row = row_numbers(chunk // 2, chunk)
    token = (_nth_upper(row >> bits, half_runs) << bits) | (row & (run - 1))
    return _is_pair(token, chunk, half_runs * run)


def _nth_upper(n: Array, half: int) -> Array:
    """The n-th number that has bit `half` set."""
    return ((n & ~(half - 1)) << 1) | half | (n & (half - 1))


def _is_pair(token: Array, chunk: int, half: int) -> Array:
    column = column_numbers(chunk // 2, chunk)
    return ((token ^ column) < 2 * half) & ((column & half) == 0)


def place_upper(scores: Array, level_scores: Array, mask: Array, half: int) -> Array:
    """scores [C, C] with those of a level [C/2, C], where mask is, in its upper rows."""
    rows = jnp.where(mask, level_scores, upper(scores, half))
    return interleave(lower(scores, half), rows, half)


def identity(size: int) -> Array:
    return row_numbers(size, size) == column_numbers(size, size)


def leaf_inverses(scores: list[Array], layout: Layout) -> list[Array]:
    """(I + L)^-1 of the 8 diagonal blocks [n, n] of each head's L, by forward substitution:
    X_r = I_r - sum over c < r of L_rc X_c.

    scores: a head's L [C, C], rows by steps, zero outside these blocks. Returns X likewise.
    At most C / n = 8 heads: their blocks lie side by side in the lanes, n columns a head, so
    that one register holds step r of all blocks of all heads and the cost is that of one head.
    """
    run, chunk = layout.run, layout.chunk
    bits = run.bit_length() - 1
    lane, row = column_numbers(chunk, chunk), row_numbers(chunk, chunk)
    group, within, row_run = lane >> bits, lane & (run - 1), row & (SUBLANES - 1)
    source = row_run * run + within  # row 8 r + s: its block, into every group of lanes
    packed = _take_lanes(scores[0], source)
    for head, rows in enumerate(scores[1:], 1):
        packed = jnp.where(group == head, _take_lanes(rows, source), packed)
    inverse = jnp.where(within == (row >> 3), 1.0, 0.0)
    for c in range(run - 1):
        done = (c + 1) * SUBLANES
        entries = _take_lanes(packed[done:], (lane - within)[done:] + c)  # L_rc over X's columns
        solved = repeat_steps(inverse[done - SUBLANES : done], run - 1 - c)  # X_c for all r > c
        inverse = layout.pin(
            jnp.concatenate([inverse[:done], inverse[done:] - entries * solved], 0)
        )
    return [
        jnp.where(group == row_run, _take_lanes(inverse, within + head * run), 0.0)
        for head in range(len(scores))
    ]


def _take_lanes(x: Array, lane: Array) -> Array:
    return jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds")
