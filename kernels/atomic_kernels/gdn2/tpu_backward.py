# SPDX-License-Identifier: Apache-2.0
"""The fused backward kernel: one pass over the tokens from the last chunk to the first.

Grid (batch, key-head groups, chunks backwards). From the inputs, S before the chunk, A, dO and the
state's gradient dS (kept as dS^T in vector memory), by the equations of `chunk`:

    R, Vn anew -> dVn -> dR, dv, dw -> dAqk, dL (L: Akk) -> dQt, dKb, dKg, dS before the chunk

and then, level by level from the widest, to dq, d(b k), dk and dg (`levels`), in `tpu_undo`.
Heads follow one another some stages apart (`tpu_order`).
"""

from collections.abc import Generator, Iterator

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2 import chunk as equations
from atomic_kernels.gdn2 import levels, tpu_blocks, tpu_chunk, tpu_tokens, tpu_undo
from atomic_kernels.gdn2.tpu_blocks import InputArrays, InputRefs, Plan
from atomic_kernels.gdn2.tpu_layout import (
    SUBLANES,
    Layout,
    read_parts,
    read_rows,
    read_steps,
    write_parts,
    write_rows,
    write_steps,
)
from atomic_kernels.gdn2.tpu_order import stagger
from atomic_kernels.gdn2.tpu_tokens import Chunk, TokenScratch
from atomic_kernels.gdn2.tpu_undo import (
    HIGH_LEVELS,
    OutputRefs,
    SavedRefs,
    Scratch,
)
from atomic_kernels.hbm import pallas_call_in_hbm

# Stages, of some 20, from one head's start to the next (`tpu_order`): of 1 to 6, the fewest cycles.
HEAD_LAG = 4


def backward_body(
    plan: Plan, inputs: InputRefs, saved: SavedRefs, outputs: OutputRefs, scratch: Scratch
) -> None:
    """One chunk of `plan.heads` heads."""
    position, heads = pl.program_id(2), range(plan.heads)

    @pl.when(position == 0)
    def _():
        tpu_tokens.read_state(plan, saved.d_state, scratch.d_state)
        if plan.decay_rows:
            scratch.d_log_rate[...] = jnp.zeros_like(scratch.d_log_rate)
            scratch.d_bias[...] = jnp.zeros_like(scratch.d_bias)

    number = pl.num_programs(2) - 1 - position
    chunk = tpu_tokens.describe_chunk(plan, number, inputs.starts)
    stagger(
        [head_program(plan, chunk, inputs, saved, outputs, scratch, h) for h in heads], HEAD_LAG
    )

    @pl.when(position == pl.num_programs(2) - 1)
    def _():
        tpu_tokens.write_state(plan, scratch.d_state, outputs.state)
        if plan.decay_rows:
            for h in heads:
                outputs.log_rate[0, :, plan.key_columns(h)] = scratch.d_log_rate[h]
                outputs.bias[0, :, plan.key_columns(h)] = scratch.d_bias[h]


def head_program(
    plan: Plan, chunk: Chunk, inputs: InputRefs, saved: SavedRefs, outputs: OutputRefs,
    scratch: Scratch, head: int,
) -> Iterator[None]:  # fmt: skip
    """One chunk of one head, stage by stage."""
    factors = yield from prepare(plan, chunk, inputs, scratch, head)
    score_high_levels(plan.layout, scratch, head)
    yield
    recompute_written(plan, chunk, inputs, saved, scratch, head)
    yield
    recompute_values(plan, chunk, saved, scratch, head)
    yield
    d_new_values(plan, chunk, saved, scratch, head)
    yield
    solve_backwards(plan, chunk, inputs, saved, outputs, scratch, head)
    yield
    tpu_undo.d_scores(plan, chunk, saved, scratch, head)
    yield
    tpu_undo.undo_state(plan, chunk, saved, scratch, factors, head)
    yield
    yield from tpu_undo.undo_high_levels(plan, scratch, factors, head)
    yield from tpu_undo.undo_low_levels(plan, scratch, head)
    finish(plan, chunk, inputs, outputs, scratch, head)


def prepare(
    plan: Plan, chunk: Chunk, inputs: InputRefs, scratch: Scratch, head: int
) -> Generator[None, None, tpu_chunk.RunFactors]:
    """The operands of all levels and of the state; returns the factors between runs."""
    layout, rounding = plan.layout, plan.layout.rounding
    tpu_tokens.load_tokens(plan, chunk, inputs, scratch.tokens, scratch.square, head)
    yield
    totals = levels.block_totals(read_steps(scratch.tokens.decay.at[head], layout), SUBLANES)
    tpu_tokens.write_low_rows(scratch.tokens, head, totals, layout)
    yield
    score_low_levels(layout, scratch, totals, head)
    yield
    factors = tpu_chunk.run_factors(totals[-1])
    for level in range(HIGH_LEVELS):
        left, right = tpu_tokens.high_operands(scratch.tokens, head, level, factors, layout)
        number = layout.low_levels + level
        write_parts(scratch.tokens.left.at[head, number], slice(None), left)
        write_parts(scratch.far_keys.at[head, level], slice(None), right)
    yield
    query, erase, key = tpu_tokens.chunk_operands(scratch.tokens, head, factors, layout)
    write_parts(scratch.state_query.at[head], slice(None), rounding.coarse(query))
    write_parts(scratch.state_erase.at[head], slice(None), rounding.coarse(erase))
    write_parts(scratch.state_key.at[head], slice(None), rounding.fine(key))
    yield
    return factors


def score_low_levels(layout: Layout, scratch: Scratch, totals: list[Array], head: int) -> None:
    """Aqk within runs; keeps the right operands, and the keys once more by steps."""
    tokens, square = scratch.tokens, scratch.square.at[head]
    scores = read_steps(square, layout)  # has the diagonal
    for level, (right, k) in enumerate(tpu_tokens.low_keys(tokens, head, totals, layout)):
        half = SUBLANES << level
        write_parts(scratch.near_keys.at[head, level], slice(None), right)
        keys = layout.rounding.coarse(levels.lower(k, half))
        write_parts(scratch.key_steps.at[head, level], slice(None), keys)
        mask = tpu_chunk.low_level_mask(layout, level)
        left = read_parts(tokens.left.at[head, level], slice(0, layout.chunk // 2))
        scores = levels.place_upper(scores, levels.level_scores(left, right), mask, half)
    write_steps(square, scores, layout)


def score_high_levels(layout: Layout, scratch: Scratch, head: int) -> None:
    """Aqk between runs."""
    scores = read_rows(scratch.square.at[head], layout)
    for level in range(HIGH_LEVELS):
        number = layout.low_levels + level
        left = read_parts(scratch.tokens.left.at[head, number], slice(0, layout.chunk // 2))
        right = read_parts(scratch.far_keys.at[head, level])
        found = levels.level_scores(left, right)  # [C/2, C]
        mask = tpu_chunk.high_level_mask(layout.chunk, 1 << level)
        scores = levels.place_upper(scores, found, mask, layout.run << level)
    write_rows(scratch.square.at[head], scores, layout)


def recompute_written(
    plan: Plan, chunk: Chunk, inputs: InputRefs, saved: SavedRefs, scratch: Scratch, head: int
) -> None:
    """R = w*v - Kb S, where Vn will be."""
    rounding = plan.layout.rounding
    erase = read_parts(scratch.state_erase.at[head])
    v, w = tpu_tokens.activate_values(plan, *tpu_tokens.raw_values(plan, inputs, head, chunk))
    written = equations.written(v, w, erase, saved.states[0, 0, head], rounding)  # [C, V]
    write_parts(scratch.new_values.at[head], slice(None), rounding.fine(written))


def recompute_values(
    plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, head: int
) -> None:
    """Vn = A R; and the diagonal of dO Vn^T."""
    rounding = plan.layout.rounding
    written = read_parts(scratch.new_values.at[head])
    new_values = equations.new_values(saved.inverses[0, 0, head], written, rounding)  # [C, V]
    d_o = tpu_tokens.load_values(plan, saved.d_o, head, chunk)
    scratch.d_diagonal[head] = equations.d_diagonal(d_o, new_values)
    write_parts(scratch.new_values.at[head], slice(None), rounding.fine(new_values))


def d_new_values(plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, head: int) -> None:
    """dVn = Aqk^T dO + Kg dS, where dR will be."""
    layout = plan.layout
    d_o = tpu_tokens.load_output_gradient(plan, saved.d_o, head, chunk)
    scores = read_rows(scratch.square.at[head], layout)
    key, d_state = read_parts(scratch.state_key.at[head]), scratch.d_state[head]
    found = equations.d_new_values(scores, d_o, key, d_state, layout.rounding)  # [C, V]
    write_parts(scratch.d_written.at[head], slice(None), layout.rounding.fine(found))


def solve_backwards(
    plan: Plan, chunk: Chunk, inputs: InputRefs, saved: SavedRefs, outputs: OutputRefs,
    scratch: Scratch, head: int,
) -> None:  # fmt: skip
    """dR = A^T dVn; dv and dw."""
    rounding = plan.layout.rounding
    found = read_parts(scratch.d_written.at[head])
    d_written = equations.d_written(saved.inverses[0, 0, head], found, rounding)  # [C, V]
    write_parts(scratch.d_written.at[head], slice(None), rounding.fine(d_written))
    raw = tpu_tokens.raw_values(plan, inputs, head, chunk)
    (v, w), pull = jax.vjp(lambda v, w: tpu_tokens.activate_values(plan, v, w), *raw)
    d_v, d_w = pull(equations.d_values(v, w, d_written))
    tpu_blocks.write_values(plan, outputs.v, head, d_v)
    tpu_blocks.write_values(plan, outputs.w, head, d_w)


def finish(
    plan: Plan, chunk: Chunk, inputs: InputRefs, outputs: OutputRefs, scratch: Scratch, head: int
) -> None:
    """The gradients of q, k, g, b, through their activation."""
    layout, tokens = plan.layout, scratch.tokens
    raw = tpu_tokens.raw_keys(plan, inputs, head, chunk)
    (q, k, _, b), pull = jax.vjp(lambda *raw: tpu_tokens.activate_keys(plan, chunk, *raw), *raw)
    decay = read_rows(tokens.decay.at[head], layout)
    d_query, d_erase, d_key = (
        read_rows(ref.at[head], layout) for ref in (tokens.query, tokens.erase, tokens.key)
    )
    d_q, d_k, d_b = equations.d_keys(
        (q, k, b), decay, scratch.d_diagonal[head], d_query, d_erase, d_key
    )
    d_g = read_rows(scratch.row_decay.at[head], layout)
    if chunk.starts is not None:
        d_g = jnp.where(chunk.starts, 0.0, d_g)  # nothing passes a segment's start
    gradients = pull((d_q, d_k, d_g, d_b))
    for ref, x in zip((outputs.q, outputs.k, outputs.g, outputs.b), gradients[:4], strict=True):
        tpu_blocks.write_keys(plan, ref, head, x)
    if plan.decay_rows:
        scratch.d_log_rate[head] += gradients[4]
        scratch.d_bias[head] += gradients[5]


def backward(
    plan: Plan, arrays: InputArrays, d_o: Array, states: Array, inverses: Array, d_state: Array
) -> tuple[list[Array], Array, list[Array]]:
    """Gradients of q, k, v, g, b, w in their dtypes; that of the initial state in float32; and,
    with `Plan.decay_rows`, those of log_rate and bias [B, 1, H K] for each batch element.

    states, inverses: what `tpu_forward.forward` saved; d_o ordered like v;
    d_state [B, H G, K, V / G] float32.
    """
    batch, chunks = inverses.shape[:2]
    specs = tpu_blocks.BlockSpecs(plan, lambda n: chunks - 1 - n)
    inputs, input_specs = specs.inputs(arrays)
    inputs += [d_o, states, inverses, d_state]
    input_specs += [
        specs.values(),
        specs.per_chunk(*states.shape[3:]),
        specs.per_chunk(*inverses.shape[3:]),
        specs.state(),
    ]
    keys, values = specs.keys(), specs.values()
    out_specs = [keys, keys, values, keys, keys, values, specs.state()]
    out_shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*arrays[:6], d_state)]
    if plan.decay_rows:
        width = plan.key_heads * plan.layout.key_size
        row = jax.ShapeDtypeStruct((batch, 1, width), jnp.float32)
        out_specs += [specs.batch_row()] * 2
        out_shapes += [row] * 2
    scratch_shapes = backward_scratch(plan)

    def body(*refs):
        named, rest = specs.name_inputs(refs[: -len(scratch_shapes)])
        scratch = refs[-len(scratch_shapes) :]
        outputs = OutputRefs(*[*rest[4:], None, None][:9])
        scratch = Scratch(TokenScratch(*scratch[:5]), *scratch[5:])
        backward_body(plan, named, SavedRefs(*rest[:4]), outputs, scratch)

    results = pallas_call_in_hbm(
        body,
        grid=(batch, plan.key_heads // plan.heads, chunks),
        in_specs=input_specs,
        out_specs=out_specs,
        out_shape=out_shapes,
        scratch_shapes=scratch_shapes,
        compiler_params=tpu_blocks.compiler_params(few_registers=True),
        name="gdn2_backward",
        interpret=plan.layout.interpret,
    )(*inputs)
    return results[:6], results[6], results[7:]


def backward_scratch(plan: Plan) -> list:
    layout, rounding, heads = plan.layout, plan.layout.rounding, plan.heads
    square = pltpu.VMEM((heads, *layout.padded(layout.chunk)), jnp.float32)
    padded = pltpu.VMEM((heads, *layout.padded(layout.key_size)), jnp.float32)
    row = pltpu.VMEM((heads, 1, layout.key_size), jnp.float32)

    def operand(*shape):
        return pltpu.VMEM((heads, *shape), rounding.dtype)

    parts, fine_parts = rounding.coarse_parts, rounding.fine_parts
    by_key = (layout.chunk, layout.key_size)
    values = operand(fine_parts, layout.chunk, layout.value_size)
    return [
        *tpu_tokens.token_scratch(plan, layout.low_levels + HIGH_LEVELS),
        operand(layout.low_levels, parts, *by_key),
        operand(HIGH_LEVELS, fine_parts, *by_key),
        operand(parts, *by_key),
        operand(parts, *by_key),
        operand(fine_parts, *by_key),
        square,
        square,
        values,
        values,
        pltpu.VMEM((heads, layout.chunk, 1), jnp.float32),
        padded,
        padded,
        pltpu.VMEM((heads, SUBLANES, layout.key_size), jnp.float32),
        operand(layout.low_levels, parts, layout.chunk // 2, layout.key_size),
        padded,
        pltpu.VMEM((heads, layout.value_size, layout.key_size), jnp.float32),
        row,
        row,
    ]
