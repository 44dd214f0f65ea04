# SPDX-License-Identifier: Apache-2.0
"""The second half of the backward kernel: from dO, dR and Vn back to x, k and the log decays.

Equations in `chunk` and `levels`. Everything is added up in the scratch that held x and k
before; only the rows that a level touches are read and written.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from atomic_kernels.gdn2 import chunk as equations
from atomic_kernels.gdn2 import levels, tpu_chunk, tpu_tokens
from atomic_kernels.gdn2.arithmetic import Operand, join
from atomic_kernels.gdn2.levels import LevelGradient, Undone
from atomic_kernels.gdn2.tpu_blocks import Plan
from atomic_kernels.gdn2.tpu_layout import (
    SUBLANES,
    Layout,
    Ref,
    read_parts,
    read_rows,
    read_steps,
    write_rows,
    write_steps,
)
from atomic_kernels.gdn2.tpu_tokens import Chunk, TokenScratch

HIGH_LEVELS = SUBLANES.bit_length() - 1


class SavedRefs(NamedTuple):
    """Blocks: dO like v; S^T, A [1, 1, heads, ., .]; dS [1, value heads, K, V / G]."""

    d_o: Ref
    states: Ref
    inverses: Ref
    d_state: Ref


class OutputRefs(NamedTuple):
    """Gradients, blocks like those of the inputs; parameter gradients are per batch element."""

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    b: Ref
    w: Ref
    state: Ref
    log_rate: Ref  # None without projections, like bias
    bias: Ref


class Scratch(NamedTuple):
    """Vector memory of a grid step, first axis heads."""

    tokens: TokenScratch  # query, erase and key turn into dx of q, dx of b k and dk
    near_keys: Ref  # [levels within runs, parts, C, K] k, in order
    far_keys: Ref  # [levels between runs, fine parts, C, K]
    state_query: Ref  # [parts, C, K] Qt
    state_erase: Ref  # [parts, C, K] Kb
    state_key: Ref  # [fine parts, C, K] Kg
    square: Ref  # padded [C, C] Aqk, then dAqk
    square2: Ref  # padded [C, C] dL
    new_values: Ref  # [fine parts, C, V] R, then Vn
    d_written: Ref  # [fine parts, C, V] dVn, then dR
    d_diagonal: Ref  # [C, 1] dO_i Vn_i
    row_decay: Ref  # padded [C, K] x*Dx, summed over levels
    key_decay: Ref  # padded [C, K] k*Dk
    run_decay: Ref  # [8, K] what all decays of a run get
    key_steps: Ref  # [levels within runs, parts, C/2, K] their lower keys, by steps
    swap: Ref  # padded [C, K], to change between row orders
    d_state: Ref  # [V, K] dS^T
    d_log_rate: Ref  # [1, K]
    d_bias: Ref  # [1, K]


def d_scores(plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, head: int) -> None:
    """dO Vn^T and -dR Vn^T, whole squares; the levels' masks choose the pairs."""
    layout, rounding = plan.layout, plan.layout.rounding
    new_values = read_parts(scratch.new_values.at[head])
    d_o = tpu_tokens.load_output_gradient(plan, saved.d_o, head, chunk)
    d_query_scores = equations.d_query_scores(d_o, new_values, rounding)
    write_rows(scratch.square.at[head], d_query_scores, layout)
    d_written = read_parts(scratch.d_written.at[head])
    d_erase_scores = equations.d_erase_scores(d_written, new_values, rounding)
    write_rows(scratch.square2.at[head], d_erase_scores, layout)


def undo_state(
    plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, factors, head: int
) -> None:
    """What Qt, Kb, Kg and the state give to dx, dk and dgc; dS goes on by one chunk."""
    layout, rounding = plan.layout, plan.layout.rounding
    d_o = tpu_tokens.load_output_gradient(plan, saved.d_o, head, chunk)
    d_written = read_parts(scratch.d_written.at[head], count=rounding.coarse_parts)
    new_values = read_parts(scratch.new_values.at[head], count=rounding.coarse_parts)
    query, erase = (
        read_parts(scratch.state_query.at[head]),
        read_parts(scratch.state_erase.at[head]),
    )
    key = read_parts(scratch.state_key.at[head])
    state, d_state = saved.states[0, 0, head], scratch.d_state[head]  # [V, K]
    d_query, d_erase, d_key = equations.d_factors(
        d_o, d_written, new_values, state, d_state, rounding
    )  # [C, K]
    row_decay = join(query) * d_query + join(erase) * d_erase
    through = equations.d_total_decay(state, d_state, factors.total)  # [1, K]
    scratch.run_decay[head] = jnp.broadcast_to(through, (SUBLANES, layout.key_size))
    before, after = factors.before[-1], factors.after[-1]
    tokens = scratch.tokens
    write_rows(tokens.query.at[head], tpu_chunk.scale_runs(d_query, before), layout)
    write_rows(tokens.erase.at[head], tpu_chunk.scale_runs(d_erase, before), layout)
    write_rows(tokens.key.at[head], tpu_chunk.scale_runs(d_key, after), layout)
    write_rows(scratch.row_decay.at[head], row_decay, layout)
    write_rows(scratch.key_decay.at[head], join(key) * d_key, layout)
    scratch.d_state[head] = equations.d_state_before(
        d_state, factors.total, d_o, query, d_written, erase, rounding
    )


def masked_gradients(plan: Plan, scores: list[Array], mask: Array, half: int) -> Operand:
    """The upper rows of dAqk and dL [C, C] at the pairs of a level, one over the other [C, C]."""
    chosen = [jnp.where(mask, levels.upper(x, half), 0.0) for x in scores]
    return plan.layout.rounding.coarse(jnp.concatenate(chosen, 0))


def undo_high_levels(plan: Plan, scratch: Scratch, factors, head: int) -> Iterator[None]:
    """Levels between runs, widest first; a stage each."""
    layout, tokens = plan.layout, scratch.tokens
    half_rows = layout.chunk // 2
    row_decay, key_decay = scratch.row_decay.at[head], scratch.key_decay.at[head]
    row_sums = tpu_chunk.run_sums(read_rows(row_decay, layout))
    key_sums = tpu_chunk.run_sums(read_rows(key_decay, layout))
    run_decay = scratch.run_decay[head]
    for level in reversed(range(HIGH_LEVELS)):
        half = layout.run << level
        mask = tpu_chunk.high_level_mask(layout.chunk, 1 << level)
        scores = [read_rows(x.at[head], layout) for x in (scratch.square, scratch.square2)]
        left = read_parts(tokens.left.at[head, layout.low_levels + level])
        right = read_parts(scratch.far_keys.at[head, level], count=layout.rounding.coarse_parts)
        d_level = masked_gradients(plan, scores, mask, half)
        d_rows, d_keys = levels.level_gradients(d_level, left, right)  # [C, K]
        products = join(left) * d_rows
        products = products[:half_rows] + products[half_rows:]  # [C/2, K], upper runs
        keys = join(right) * d_keys  # zero in upper runs
        run_decay = tpu_chunk.pass_down_runs(run_decay, row_sums, key_sums, 1 << level)
        if level:
            zeros = jnp.zeros_like(products)
            row_sums = row_sums + tpu_chunk.run_sums(levels.interleave(zeros, products, half))
            key_sums = key_sums + tpu_chunk.run_sums(keys)
        add_upper_runs(row_decay, products, None, level, layout)
        before, after = (factors.before[level], factors.after[level]) if level else (None, None)
        add_upper_runs(tokens.query.at[head], d_rows[:half_rows], before, level, layout)
        add_upper_runs(tokens.erase.at[head], d_rows[half_rows:], before, level, layout)
        add_lower_runs(key_decay, keys, None, level, layout)
        add_lower_runs(tokens.key.at[head], d_keys, after, level, layout)
        scratch.run_decay[head] = run_decay
        yield


def add_upper_runs(ref, x: Array, factor: Array | None, level: int, layout: Layout) -> None:
    """Adds x [C/2, D], by runs times factor [8, D], to the upper runs of a level."""
    half = layout.run << level
    added = levels.interleave(jnp.zeros_like(x), x, half)
    if factor is not None:
        added = tpu_chunk.scale_runs(added, factor)
    changed = tpu_chunk.numbers(SUBLANES, 1 << level, above=True)
    write_rows(ref, read_rows(ref, layout) + added, layout, changed)


def add_lower_runs(ref, x: Array, factor: Array | None, level: int, layout: Layout) -> None:
    """Adds the lower runs of x [C, D], by runs times factor [8, D]; its upper runs are zero."""
    if factor is not None:
        x = tpu_chunk.scale_runs(x, factor)
    changed = tpu_chunk.numbers(SUBLANES, 1 << level, above=False)
    write_rows(ref, read_rows(ref, layout) + x, layout, changed)


def undo_low_levels(plan: Plan, scratch: Scratch, head: int) -> Iterator[None]:
    """Levels within runs, widest first; a stage each."""
    layout, tokens = plan.layout, scratch.tokens
    # Made anew: kept since the operands were made, they would be 31 registers a head.
    totals = levels.block_totals(read_steps(tokens.decay.at[head], layout), SUBLANES)
    half_rows = layout.chunk // 2
    # Of these only the rows that a level changes are read and written.
    refs = (tokens.query, tokens.erase, tokens.key, scratch.row_decay, scratch.key_decay)
    decay = scratch.run_decay[head]
    for level in reversed(range(layout.low_levels)):
        half = SUBLANES << level
        mask = tpu_chunk.low_level_mask(layout, level)
        scores = [read_steps(x.at[head], layout) for x in (scratch.square, scratch.square2)]
        left = read_parts(tokens.left.at[head, level])
        right = read_parts(scratch.near_keys.at[head, level])
        d_level = masked_gradients(plan, scores, mask, half)
        d_rows, d_keys = levels.level_gradients(d_level, left, right)  # [C, K]
        write_rows(scratch.swap.at[head], d_keys, layout)
        d_keys = levels.lower(read_steps(scratch.swap.at[head], layout), half)  # [C/2, K]
        products = join(left) * d_rows
        found = LevelGradient(
            query=d_rows[:half_rows],
            erase=d_rows[half_rows:],
            key=d_keys,
            rows=products[:half_rows] + products[half_rows:],
            keys=join(read_parts(scratch.key_steps.at[head, level])) * d_keys,
        )
        query, erase, key, rows, keys = (read_steps(ref.at[head], layout) for ref in refs)
        done = Undone(query, erase, key, rows, keys, decay)
        *arrays, decay = levels.undo_level(done, found, totals, level, SUBLANES)
        above = tpu_chunk.numbers(layout.run, 1 << level, above=True)
        below = tpu_chunk.numbers(layout.run, 1 << level, above=False)
        for ref, x, changed in zip(refs, arrays, (above, above, below, above, below), strict=True):
            write_steps(ref.at[head], x, layout, changed)
        yield
    row_decay = scratch.row_decay.at[head]
    write_steps(row_decay, read_steps(row_decay, layout) + decay, layout)
