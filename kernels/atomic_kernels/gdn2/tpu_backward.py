# SPDX-License-Identifier: Apache-2.0
"""The fused backward kernel: one pass over the tokens from the last chunk to the first.

Grid (batch, key-head groups, chunks backwards). From the inputs, S before the chunk, A, dO and
the state's cotangent dS (kept as dS^T in vector memory), with the symbols of `tpu_forward`:

    R = w*v - Kb S    Vn = A R    dVn = Aqk^T dO + Kg dS    dR = A^T dVn
    dv = dR*w    dw = dR*v    dAqk = dO Vn^T (i >= j)    dL = -dR Vn^T (i > j)
    dQt = dO S^T    dKb = -dR S^T    dKg = Vn dS^T
    dS <- Diag(exp gc_last) dS + Qt^T dO - Kb^T dR

Each level is undone in turn, from the widest (x its rows q e.. and (b k) e.., k its keys):

    Dx_i = sum_j ds_ij k_j        Dk_j = sum_i ds_ij x_i         ds: dAqk, dL at the level's pairs
    dx <- dx T_lower + Dx  (upper half)     dk <- dk T_upper + Dk  (lower half)

and dq = dx e + dAqk_ii k,  d(b k) = dx e,  dk = dk + d(b k) b + dAqk_ii q,  db = d(b k) k.
A log decay g_t lies in the products of those upper rows i >= t and lower keys j < t of a level
whose half block it shares, and in those of the state:

    dg_t = sum over i of x_i*Dx_i + sum over j of k_j*Dk_j

With gc the sum over all of them would be one reverse cumulative sum, of terms that cancel: after
a strong decay nothing would be left of dg but rounding. These products use the rounded x and k
that were multiplied, so that what a level's rows get and its keys get are the same sums.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2 import tpu_blocks, tpu_chunk, tpu_tokens, tpu_undo
from atomic_kernels.gdn2.tpu_blocks import InputArrays, InputRefs, Plan
from atomic_kernels.gdn2.tpu_layout import (
    NN,
    NT,
    SUBLANES,
    TN,
    Layout,
    dot,
    lower,
    read_parts,
    read_rows,
    read_steps,
    write_parts,
    write_rows,
    write_steps,
)
from atomic_kernels.gdn2.tpu_tokens import Chunk, TokenScratch
from atomic_kernels.gdn2.tpu_undo import (
    HIGH_LEVELS,
    OutputRefs,
    SavedRefs,
    Scratch,
)
from atomic_kernels.hbm import pallas_call_in_hbm


def backward_body(
    plan: Plan, inputs: InputRefs, saved: SavedRefs, outputs: OutputRefs, scratch: Scratch
) -> None:
    """One chunk of `plan.heads` heads, phase by phase."""
    position, heads = pl.program_id(2), range(plan.heads)

    @pl.when(position == 0)
    def _():
        tpu_tokens.read_state(plan, saved.d_state, scratch.d_state)
        if plan.decay_rows:
            scratch.d_log_rate[...] = jnp.zeros_like(scratch.d_log_rate)
            scratch.d_bias[...] = jnp.zeros_like(scratch.d_bias)

    number = pl.num_programs(2) - 1 - position
    chunk = tpu_tokens.describe_chunk(plan, number, inputs.starts)
    factors = [prepare(plan, chunk, inputs, scratch, h) for h in heads]
    for h in heads:
        score_high_levels(plan.layout, scratch, h)
    for h in heads:
        recompute_written(plan, chunk, inputs, saved, scratch, h)
    for h in heads:
        recompute_values(plan, chunk, saved, scratch, h)
    for h in heads:
        d_new_values(plan, chunk, saved, scratch, h)
    for h in heads:
        solve_backwards(plan, chunk, inputs, saved, outputs, scratch, h)
    for h in heads:
        tpu_undo.d_scores(plan, chunk, saved, scratch, h)
    for h in heads:
        tpu_undo.undo_state(plan, chunk, saved, scratch, factors[h], h)
    for h in heads:
        tpu_undo.undo_high_levels(plan, scratch, factors[h], h)
    for h in heads:
        tpu_undo.undo_low_levels(plan, scratch, h)
    for h in heads:
        finish(plan, chunk, inputs, outputs, scratch, h)

    @pl.when(position == pl.num_programs(2) - 1)
    def _():
        tpu_tokens.write_state(plan, scratch.d_state, outputs.state)
        if plan.decay_rows:
            for h in heads:
                outputs.log_rate[0, :, plan.key_columns(h)] = scratch.d_log_rate[h]
                outputs.bias[0, :, plan.key_columns(h)] = scratch.d_bias[h]


def prepare(
    plan: Plan, chunk: Chunk, inputs: InputRefs, scratch: Scratch, head: int
) -> tpu_chunk.RunFactors:
    """The operands of all levels and of the state; returns the factors between runs."""
    layout = plan.layout
    q, k, g, b = tpu_tokens.activate_keys(
        plan, chunk, *tpu_tokens.raw_keys(plan, inputs, head, chunk)
    )
    diagonal = jnp.sum(q * k, 1, keepdims=True)  # [C, 1]
    scores = jnp.where(tpu_chunk.identity(layout.chunk), diagonal, 0.0)
    write_rows(scratch.square.at[head], scores, layout)
    decay = tpu_tokens.decay_factors(g, chunk)
    tpu_tokens.write_tokens(scratch.tokens, head, q, k, decay, b, layout)
    totals = tpu_chunk.block_totals(read_steps(scratch.tokens.decay.at[head], layout))
    tpu_tokens.write_low_rows(scratch.tokens, head, totals, layout)
    score_low_levels(layout, scratch, totals, head)
    factors = tpu_chunk.run_factors(totals[-1])
    for level in range(HIGH_LEVELS):
        left, right = tpu_tokens.high_operands(scratch.tokens, head, level, factors, layout)
        number = layout.low_levels + level
        write_parts(scratch.tokens.left.at[head, number], slice(None), left)
        write_parts(scratch.far_keys.at[head, level], slice(None), right)
    query, erase, key = tpu_tokens.chunk_operands(scratch.tokens, head, factors, layout)
    write_parts(scratch.state_query.at[head], slice(None), layout.split(query))
    write_parts(scratch.state_erase.at[head], slice(None), layout.split(erase))
    write_parts(scratch.state_key.at[head], slice(None), layout.split_fine(key))
    return factors


def score_low_levels(layout: Layout, scratch: Scratch, totals: list[Array], head: int) -> None:
    """Aqk within runs; keeps the right operands, and the keys once more by steps."""
    tokens, square = scratch.tokens, scratch.square.at[head]
    scores = read_steps(square, layout)  # has the diagonal
    for level, (right, k) in enumerate(tpu_tokens.low_keys(tokens, head, totals, layout)):
        half = SUBLANES << level
        write_parts(scratch.near_keys.at[head, level], slice(None), right)
        write_parts(scratch.key_steps.at[head, level], slice(None), layout.split(lower(k, half)))
        mask = tpu_chunk.low_level_mask(layout.chunk, 1 << level)
        left = read_parts(tokens.left.at[head, level], slice(0, layout.chunk // 2))
        scores = tpu_chunk.place_upper(scores, dot(left, right, NT), mask, half)
    write_steps(square, scores, layout)


def score_high_levels(layout: Layout, scratch: Scratch, head: int) -> None:
    """Aqk between runs."""
    scores = read_rows(scratch.square.at[head], layout)
    for level in range(HIGH_LEVELS):
        number = layout.low_levels + level
        left = read_parts(scratch.tokens.left.at[head, number], slice(0, layout.chunk // 2))
        found = dot(left, read_parts(scratch.far_keys.at[head, level]), NT)  # [C/2, C]
        mask = tpu_chunk.high_level_mask(layout.chunk, 1 << level)
        scores = tpu_chunk.place_upper(scores, found, mask, layout.run << level)
    write_rows(scratch.square.at[head], scores, layout)


def recompute_written(
    plan: Plan, chunk: Chunk, inputs: InputRefs, saved: SavedRefs, scratch: Scratch, head: int
) -> None:
    """R = w*v - Kb S, where Vn will be."""
    layout = plan.layout
    erase = read_parts(scratch.state_erase.at[head])
    v, w = tpu_tokens.activate_values(plan, *tpu_tokens.raw_values(plan, inputs, head, chunk))
    written = w * v - dot(erase, layout.split(saved.states[0, 0, head]), NT)  # [C, V]
    write_parts(scratch.new_values.at[head], slice(None), layout.split_fine(written))


def recompute_values(
    plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, head: int
) -> None:
    """Vn = A R; and the diagonal of dO Vn^T in float32, which alone makes dq where decay is strong
    and may be a small sum of large terms."""
    layout = plan.layout
    inverse = layout.split_fine(saved.inverses[0, 0, head])
    new_values = dot(inverse, read_parts(scratch.new_values.at[head]), NN)  # [C, V]
    d_o = tpu_tokens.load_values(plan, saved.d_o, head, chunk)
    scratch.d_diagonal[head] = jnp.sum(d_o * new_values, 1, keepdims=True)
    write_parts(scratch.new_values.at[head], slice(None), layout.split_fine(new_values))


def d_new_values(plan: Plan, chunk: Chunk, saved: SavedRefs, scratch: Scratch, head: int) -> None:
    """dVn = Aqk^T dO + Kg dS, where dR will be."""
    layout = plan.layout
    d_o = tpu_tokens.load_output_gradient(plan, saved.d_o, head, chunk)
    scores = layout.split_fine(read_rows(scratch.square.at[head], layout))
    key = read_parts(scratch.state_key.at[head])
    d_state = layout.split_fine(scratch.d_state[head])
    found = dot(scores, d_o, TN) + dot(key, d_state, NT)  # [C, V]
    write_parts(scratch.d_written.at[head], slice(None), layout.split_fine(found))


def solve_backwards(
    plan: Plan, chunk: Chunk, inputs: InputRefs, saved: SavedRefs, outputs: OutputRefs,
    scratch: Scratch, head: int,
) -> None:  # fmt: skip
    """dR = A^T dVn; dv and dw."""
    layout = plan.layout
    found = read_parts(scratch.d_written.at[head])
    d_written = dot(layout.split_fine(saved.inverses[0, 0, head]), found, TN)  # [C, V]
    write_parts(scratch.d_written.at[head], slice(None), layout.split_fine(d_written))
    raw = tpu_tokens.raw_values(plan, inputs, head, chunk)
    (v, w), pull = jax.vjp(lambda v, w: tpu_tokens.activate_values(plan, v, w), *raw)
    d_v, d_w = pull((d_written * w, d_written * v))
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
    d_diagonal = scratch.d_diagonal[head]  # [C, 1]
    d_erase = read_rows(tokens.erase.at[head], layout) * decay
    d_q = read_rows(tokens.query.at[head], layout) * decay + d_diagonal * k
    d_k = read_rows(tokens.key.at[head], layout) + d_erase * b + d_diagonal * q
    d_g = read_rows(scratch.row_decay.at[head], layout)
    if chunk.starts is not None:
        d_g = jnp.where(chunk.starts, 0.0, d_g)  # nothing passes a segment's start
    gradients = pull((d_q, d_k, d_g, d_erase * k))
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
        compiler_params=tpu_blocks.compiler_params(),
        name="gdn2_backward",
        interpret=plan.layout.interpret,
    )(*inputs)
    return results[:6], results[6], results[7:]


def backward_scratch(plan: Plan) -> list:
    layout, heads = plan.layout, plan.heads
    square = pltpu.VMEM((heads, *layout.padded(layout.chunk)), jnp.float32)
    padded = pltpu.VMEM((heads, *layout.padded(layout.key_size)), jnp.float32)
    row = pltpu.VMEM((heads, 1, layout.key_size), jnp.float32)

    def operand(*shape):
        return pltpu.VMEM((heads, *shape), layout.operand_dtype)

    parts, fine_parts = layout.stored_parts, layout.stored_fine_parts
    by_key = (layout.chunk, layout.key_size)
    values = operand(layout.stored_fine_parts, layout.chunk, layout.value_size)
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
