# SPDX-License-Identifier: Apache-2.0
"""What a chunk on a TPU has beside `levels` and `chunk`: levels between runs, and the leaves.

A chunk is eight runs of n = C / 8 tokens (`tpu_layout`). Levels with half sizes h < n are those of
`levels`, by steps of eight rows. Those with h = n, 2n, 4n pair whole runs: rows and keys keep their
products over the run, and the factor of all levels below is one row for each run (`RunFactors`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2.levels import is_pair, level_mask, nth_upper, repeat_steps
from atomic_kernels.gdn2.tpu_layout import SUBLANES, Layout, column_numbers, row_numbers


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


def pass_down_runs(to_all: Array, rows: Array, keys: Array, half: int) -> Array:
    """`levels.pass_down` between runs: what the decays of each run get from all of their block of
    2 half runs, [8, K] each."""
    run = row_numbers(*rows.shape)
    size = 1
    while size < half:
        rows, keys = rows + _swap_runs(rows, size), keys + _swap_runs(keys, size)
        size *= 2
    is_upper = (run & half) != 0
    return to_all + jnp.where(is_upper, _swap_runs(keys, half), _swap_runs(rows, half))


def _swap_runs(x: Array, half: int) -> Array:
    """Row s of x [8, K] from row s ^ half."""
    is_upper = (row_numbers(*x.shape) & half) != 0
    return jnp.where(is_upper, pltpu.roll(x, half, 0), pltpu.roll(x, SUBLANES - half, 0))


def low_level_mask(layout: Layout, level: int) -> Array:
    """[C/2, C] for the upper steps of a level, 8 rows a step: which columns are their pairs."""
    shape = (layout.chunk // 2, layout.chunk)
    return level_mask(shape, 1 << level, SUBLANES, layout.run)


def high_level_mask(chunk: int, half_runs: int) -> Array:
    """[C/2, C] for the upper runs of a level, in order: which columns are their pairs."""
    run = chunk // SUBLANES
    bits = run.bit_length() - 1
    row = row_numbers(chunk // 2, chunk)
    token = (nth_upper(row >> bits, half_runs) << bits) | (row & (run - 1))
    return is_pair(token, column_numbers(chunk // 2, chunk), half_runs * run)


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
        solved = repeat_steps(inverse[done - SUBLANES : done], run - 1 - c, SUBLANES)  # X_c
        inverse = layout.pin(
            jnp.concatenate([inverse[:done], inverse[done:] - entries * solved], 0)
        )
    return [
        jnp.where(group == row_run, _take_lanes(inverse, within + head * run), 0.0)
        for head in range(len(scores))
    ]


def _take_lanes(x: Array, lane: Array) -> Array:
    return jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds")
