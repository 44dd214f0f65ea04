# SPDX-License-Identifier: Apache-2.0
"""The fused forward kernel: one pass over the tokens, the state in vector memory.

Grid (batch, key-head groups, chunks); the chunks are sequential. For a chunk [C, .] of a key head
(`chunk` has the equations, `levels` the scores; V holds the columns of all its value heads):

    Aqk, L = level scores of q and b*k against k     A = (I + L)^-1     [C, C]
    R = w*v - Kb S       Vn = A R       O = Qt S + Aqk Vn               [C, V]
    S <- Diag(exp gc_last) S + Kg^T Vn                                  [K, V], kept as S^T

Operands of these products are rounded as `chunk` says; in the scores k between runs is fine, and in
the inverse all are. Scores, state and sums are float32.

The body goes phase by phase, each over all heads of the grid step, so that independent work lies
side by side for the scheduler. Saved for the backward: S^T before each chunk, and A.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2 import chunk as equations
from atomic_kernels.gdn2 import levels, tpu_blocks, tpu_chunk, tpu_tokens
from atomic_kernels.gdn2.tpu_blocks import InputArrays, InputRefs, Plan
from atomic_kernels.gdn2.tpu_layout import (
    SUBLANES,
    Layout,
    Ref,
    read_parts,
    read_rows,
    read_steps,
    write_parts,
    write_rows,
    write_steps,
)
from atomic_kernels.gdn2.tpu_tokens import TokenScratch
from atomic_kernels.hbm import pallas_call_in_hbm

HIGH_LEVELS = SUBLANES.bit_length() - 1


class Scratch(NamedTuple):
    """Vector memory of a grid step, first axis heads."""

    tokens: TokenScratch
    query_scores: Ref  # padded [C, C] Aqk
    leaf_scores: Ref  # [C, C] L within runs, step after step
    cross_scores: Ref  # [3, parts, C/2, C] L between runs, upper runs of each level
    inverse: Ref  # padded [C, C] A
    written: Ref  # [fine parts, C, V] R, then Vn
    state: Ref  # [V, K] S^T


def forward_body(plan: Plan, save: bool, input_refs, state_ref, output_refs, scratch: Scratch):
    """One chunk of `plan.heads` heads."""
    layout, number = plan.layout, pl.program_id(2)
    o_ref, last_ref, states_ref, inverses_ref = output_refs

    @pl.when(number == 0)
    def _():
        tpu_tokens.read_state(plan, state_ref, scratch.state)

    chunk = tpu_tokens.describe_chunk(plan, number, input_refs.starts)
    for head in range(plan.heads):
        tpu_tokens.load_tokens(plan, chunk, input_refs, scratch.tokens, scratch.query_scores, head)
    factors = [score_low_levels(layout, scratch, head) for head in range(plan.heads)]
    invert_leaves(plan, scratch)
    score_high_levels(plan, scratch, factors)
    climb_ladder(plan, scratch)
    for head in range(plan.heads):
        if save:
            states_ref[0, 0, head] = scratch.state[head]
            inverses_ref[0, 0, head] = read_rows(scratch.inverse.at[head], layout)
        read_erased(plan, chunk, input_refs, scratch, factors[head], head)
    for head in range(plan.heads):
        solve(layout, scratch, head)
    for head in range(plan.heads):
        o = advance(layout, scratch, factors[head], head)
        tpu_blocks.write_values(plan, o_ref, head, o)

    @pl.when(number == pl.num_programs(2) - 1)
    def _():
        tpu_tokens.write_state(plan, scratch.state, last_ref)


def score_low_levels(layout: Layout, scratch: Scratch, head: int) -> tpu_chunk.RunFactors:
    """Aqk and L within runs; returns the factors for the levels between runs."""
    tokens, half_rows = scratch.tokens, layout.chunk // 2
    totals = levels.block_totals(read_steps(tokens.decay.at[head], layout), SUBLANES)
    tpu_tokens.write_low_rows(tokens, head, totals, layout)
    query = read_steps(scratch.query_scores.at[head], layout)  # [C, C], has the diagonal
    erase = jnp.zeros((layout.chunk, layout.chunk), jnp.float32)
    for level, (right, _) in enumerate(tpu_tokens.low_keys(tokens, head, totals, layout)):
        # [C, C]: q's upper steps, then b k's
        scores = levels.level_scores(read_parts(tokens.left.at[head, level]), right)
        mask = tpu_chunk.low_level_mask(layout, level)
        query = levels.place_upper(query, scores[:half_rows], mask, SUBLANES << level)
        erase = levels.place_upper(erase, scores[half_rows:], mask, SUBLANES << level)
    write_steps(scratch.query_scores.at[head], query, layout)
    scratch.leaf_scores[head] = erase
    return tpu_chunk.run_factors(totals[-1])


def invert_leaves(plan: Plan, scratch: Scratch) -> None:
    """The inverses of the diagonal blocks of L, one a run, into an otherwise zero A."""
    scores = [scratch.leaf_scores[head] for head in range(plan.heads)]
    for head, inverse in enumerate(tpu_chunk.leaf_inverses(scores, plan.layout)):
        write_steps(scratch.inverse.at[head], inverse, plan.layout)


def score_high_levels(plan: Plan, scratch: Scratch, factors: list[tpu_chunk.RunFactors]) -> None:
    """Aqk and L between runs."""
    layout = plan.layout
    half_rows = layout.chunk // 2
    for head in range(plan.heads):
        query = read_rows(scratch.query_scores.at[head], layout)
        for level in range(HIGH_LEVELS):
            left, right = tpu_tokens.high_operands(
                scratch.tokens, head, level, factors[head], layout
            )
            scores = levels.level_scores(left, right)  # [C, C]
            mask = tpu_chunk.high_level_mask(layout.chunk, 1 << level)
            query = levels.place_upper(query, scores[:half_rows], mask, layout.run << level)
            cross = layout.rounding.fine(jnp.where(mask, scores[half_rows:], 0.0))
            write_parts(scratch.cross_scores.at[head, level], slice(None), cross)
        write_rows(scratch.query_scores.at[head], query, layout)


def climb_ladder(plan: Plan, scratch: Scratch) -> None:
    """A for blocks of 2, 4, 8 runs: A21 = -A22 (L21 A11), from the halves' inverses.

    The middle operand is zero in the rows of lower halves, so A22 needs no mask.
    """
    layout, rounding = plan.layout, plan.layout.rounding
    for level in range(HIGH_LEVELS):
        half = layout.run << level
        middles = []
        for head in range(plan.heads):
            cross = read_parts(scratch.cross_scores.at[head, level])
            halves = read_rows(scratch.inverse.at[head], layout)
            middle = rounding.fine(equations.ladder_middle(cross, halves, rounding))  # [C/2, C]
            middles.append(
                tuple(levels.interleave(jnp.zeros_like(part), part, half) for part in middle)
            )  # [C, C]
        changed = tpu_chunk.numbers(SUBLANES, 1 << level, above=True)
        for head in range(plan.heads):
            ref = scratch.inverse.at[head]
            inverse = read_rows(ref, layout)
            under = levels.upper(inverse, half)  # [C/2, C]
            under = under + equations.ladder_cross(under, middles[head], rounding)
            inverse = levels.interleave(levels.lower(inverse, half), under, half)
            write_rows(ref, inverse, layout, changed)


def read_erased(
    plan: Plan, chunk, input_refs: InputRefs, scratch: Scratch, factors, head: int
) -> None:
    """R = w*v - Kb S."""
    layout, rounding = plan.layout, plan.layout.rounding
    rows = read_rows(scratch.tokens.erase.at[head], layout)
    erase = tpu_chunk.scale_runs(rows, factors.before[-1])
    raw = tpu_tokens.raw_values(plan, input_refs, head, chunk)
    v, w = tpu_tokens.activate_values(plan, *raw)
    written = equations.written(v, w, erase, scratch.state[head], rounding)  # [C, V]
    write_parts(scratch.written.at[head], slice(None), rounding.fine(written))


def solve(layout: Layout, scratch: Scratch, head: int) -> None:
    """Vn = A R, in R's place."""
    inverse, written = read_rows(scratch.inverse.at[head], layout), scratch.written.at[head]
    new_values = equations.new_values(inverse, read_parts(written), layout.rounding)  # [C, V]
    write_parts(written, slice(None), layout.rounding.fine(new_values))


def advance(layout: Layout, scratch: Scratch, factors, head: int) -> Array:
    """O = Qt S + Aqk Vn [C, V]; S goes on by one chunk."""
    rounding, tokens = layout.rounding, scratch.tokens
    query = tpu_chunk.scale_runs(read_rows(tokens.query.at[head], layout), factors.before[-1])
    key = tpu_chunk.scale_runs(read_rows(tokens.key.at[head], layout), factors.after[-1])
    scores = read_rows(scratch.query_scores.at[head], layout)
    new_values = read_parts(scratch.written.at[head])
    state = scratch.state[head]  # [V, K]
    o = equations.read_state(query, state, rounding) + equations.read_chunk(
        scores, new_values, rounding
    )
    scratch.state[head] = equations.next_state(state, factors.total, new_values, key, rounding)
    return o


def forward(
    plan: Plan, arrays: InputArrays, initial_state: Array | None, *, save: bool
) -> tuple[Array, Array, Array | None, Array | None]:
    """o, ordered like v, the last state [B, H G, K, V / G], and, to save, S^T [B, N, H, V, K] and A
    [B, N, H, C, C].

    initial_state [B, H G, K, V / G] float32, or None for zeros.
    """
    layout, heads = plan.layout, plan.heads
    batch, chunks = arrays.q.shape[0], pl.cdiv(plan.length, layout.chunk)
    state_shape = (batch, plan.key_heads * plan.group, layout.key_size, plan.value_width)
    specs = tpu_blocks.BlockSpecs(plan, lambda n: n)
    inputs, input_specs = specs.inputs(arrays)
    if initial_state is not None:
        inputs, input_specs = [*inputs, initial_state], [*input_specs, specs.state()]

    def body(*refs):
        refs, scratch = refs[: -len(scratch_shapes)], refs[-len(scratch_shapes) :]
        named, rest = specs.name_inputs(refs)
        state_ref = rest.pop(0) if initial_state is not None else None
        outputs = [*rest, None, None][:4]
        scratch = Scratch(TokenScratch(*scratch[:5]), *scratch[5:])
        forward_body(plan, save, named, state_ref, outputs, scratch)

    out_specs = [specs.values(), specs.state()]
    out_shapes = [
        jax.ShapeDtypeStruct(arrays.v.shape, arrays.v.dtype),
        jax.ShapeDtypeStruct(state_shape, jnp.float32),
    ]
    if save:
        saved = [(layout.value_size, layout.key_size), (layout.chunk, layout.chunk)]
        for shape in saved:
            out_specs.append(specs.per_chunk(*shape))
            whole = (batch, chunks, plan.key_heads, *shape)
            out_shapes.append(jax.ShapeDtypeStruct(whole, jnp.float32))
    scratch_shapes = forward_scratch(plan)
    results = pallas_call_in_hbm(
        body,
        grid=(batch, plan.key_heads // heads, chunks),
        in_specs=input_specs,
        out_specs=out_specs,
        out_shape=out_shapes,
        scratch_shapes=scratch_shapes,
        compiler_params=tpu_blocks.compiler_params(few_registers=layout.parts != 1),
        name="gdn2_forward",
        interpret=layout.interpret,
    )(*inputs)
    o, state, *residuals = results
    states, inverses = residuals if save else (None, None)
    return o, state, states, inverses


def forward_scratch(plan: Plan) -> list:
    layout, rounding, heads = plan.layout, plan.layout.rounding, plan.heads
    square = pltpu.VMEM((heads, *layout.padded(layout.chunk)), jnp.float32)
    parts = rounding.fine_parts
    return [
        *tpu_tokens.token_scratch(plan, layout.low_levels),
        square,
        pltpu.VMEM((heads, layout.chunk, layout.chunk), jnp.float32),
        pltpu.VMEM((heads, HIGH_LEVELS, parts, layout.chunk // 2, layout.chunk), rounding.dtype),
        square,
        pltpu.VMEM((heads, parts, layout.chunk, layout.value_size), rounding.dtype),
        pltpu.VMEM((heads, layout.value_size, layout.key_size), jnp.float32),
    ]
