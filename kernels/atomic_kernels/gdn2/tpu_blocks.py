# SPDX-License-Identifier: Apache-2.0
"""How a launch's arrays are cut into blocks, a grid step each: (batch, key-head group, chunk).

Tokens come in one of two orders, whichever needs no copy. *Token-major* [B, T, H D], a head a slice
of lanes, is what a matrix product leaves. *Head-major* [B, H, T, D] is how XLA lays out an argument
[B, T, H, D] whose H does not fill tiles (see `head_major`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2.gates import Projections
from atomic_kernels.gdn2.tpu_layout import SUBLANES, Layout, Ref


def head_major(heads: int) -> bool:
    """Whether XLA keeps an array [B, T, heads, D] of its own choice with T inside heads, so that
    its transpose is free and its view as [B, T, heads D] a copy: where heads, as the tiles' rows,
    would be padded (compiled for v5e, bfloat16 and float32, D = 128, heads 1 to 24)."""
    return heads % SUBLANES != 0 and heads not in (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a launch that is not an array."""

    layout: Layout
    key_heads: int  # H
    heads: int  # of them in a grid step; 0 until `tpu_tiles` chooses
    group: int  # value heads of a key head
    scale: float
    length: int  # T
    segmented: bool
    keys_head_major: bool  # q, k, g, b come as [B, H, T, K], not as [B, T, H K]
    values_head_major: bool  # v, w, o likewise
    projections: Projections | None
    decay_rows: bool  # A_log or dt_bias is given: log_rate and bias come with the projections

    @property
    def value_width(self) -> int:
        """Columns of one value head."""
        return self.layout.value_size // self.group

    def key_columns(self, head: int) -> slice:
        return slice(head * self.layout.key_size, (head + 1) * self.layout.key_size)


class InputRefs(NamedTuple):
    """Blocks of `BlockSpecs.keys` for q, k, g, b and `values` for v, w; rows [1, heads * K]."""

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    b: Ref
    w: Ref
    log_rate: Ref  # A_log, repeated K times; None without `Plan.decay_rows`
    bias: Ref  # dt_bias, likewise
    starts: Ref  # [1, 1, C] int32, 1 where a segment starts; None without segments


class InputArrays(NamedTuple):
    """q, k, g, b [B, T, H K] or [B, H, T, K]; v, w [B, T, H V] or [B, H G, T, V / G], as the plan
    says; log_rate, bias [1, H K]; starts [B, 1, T]."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array
    w: Array
    log_rate: Array | None = None
    bias: Array | None = None
    starts: Array | None = None


class BlockSpecs:
    """The blocks of a grid step (batch, head group, position) in the arrays of a launch.

    chunk_at gives the chunk of a position: the backward goes from the last to the first.
    """

    def __init__(self, plan: Plan, chunk_at: Callable[[Array], Array]):
        self._plan, self._chunk_at = plan, chunk_at

    def keys(self) -> pl.BlockSpec:
        """[1, C, heads K], or head-major [1, heads, C, K]."""
        plan = self._plan
        return self._tokens(plan.heads, plan.layout.key_size, head_major=plan.keys_head_major)

    def values(self) -> pl.BlockSpec:
        """[1, C, heads V], or head-major [1, heads G, C, V / G]."""
        plan = self._plan
        count = plan.heads * plan.group
        return self._tokens(count, plan.value_width, head_major=plan.values_head_major)

    def key_row(self) -> pl.BlockSpec:
        width = self._plan.heads * self._plan.layout.key_size
        return pl.BlockSpec((1, width), lambda b, h, n: (0, h))

    def batch_row(self) -> pl.BlockSpec:
        """[B, 1, H K]."""
        width = self._plan.heads * self._plan.layout.key_size
        return pl.BlockSpec((1, 1, width), lambda b, h, n: (b, 0, h))

    def state(self) -> pl.BlockSpec:
        """[B, value heads, K, V / G]."""
        plan = self._plan
        shape = (1, plan.heads * plan.group, plan.layout.key_size, plan.value_width)
        return pl.BlockSpec(shape, lambda b, h, n: (b, h, 0, 0))

    def per_chunk(self, rows: int, columns: int) -> pl.BlockSpec:
        """[B, N, heads, rows, columns]."""
        shape = (1, 1, self._plan.heads, rows, columns)
        return pl.BlockSpec(shape, lambda b, h, n: (b, self._chunk_at(n), h, 0, 0))

    def inputs(self, arrays: InputArrays) -> tuple[list[Array], list[pl.BlockSpec]]:
        """The arrays that there are, with their blocks."""
        chunk = self._plan.layout.chunk
        starts = pl.BlockSpec((1, 1, chunk), lambda b, h, n: (b, 0, self._chunk_at(n)))
        keys, values, row = self.keys(), self.values(), self.key_row()
        specs = (keys, keys, values, keys, keys, values, row, row, starts)
        pairs = [(x, spec) for x, spec in zip(arrays, specs, strict=True) if x is not None]
        return [x for x, _ in pairs], [spec for _, spec in pairs]

    def name_inputs(self, refs: Sequence) -> tuple[InputRefs, list]:
        """The references of `inputs`, named, and those that follow."""
        q, k, v, g, b, w, *rest = refs
        log_rate = bias = starts = None
        if self._plan.decay_rows:
            log_rate, bias, *rest = rest
        if self._plan.segmented:
            starts, *rest = rest
        return InputRefs(q, k, v, g, b, w, log_rate, bias, starts), rest

    def _tokens(self, count: int, size: int, *, head_major: bool) -> pl.BlockSpec:
        chunk = self._plan.layout.chunk
        if head_major:
            return pl.BlockSpec(
                (1, count, chunk, size), lambda b, h, n: (b, h, self._chunk_at(n), 0)
            )
        return pl.BlockSpec((1, chunk, count * size), lambda b, h, n: (b, self._chunk_at(n), h))


# Heads of a block ---------------------------------------------------------------------------------


def read_keys(plan: Plan, ref: Ref, head: int) -> Array:
    """One head [C, K] of a block of `BlockSpecs.keys`."""
    return ref[0, head] if plan.keys_head_major else ref[0, :, plan.key_columns(head)]


def write_keys(plan: Plan, ref: Ref, head: int, x: Array) -> None:
    """Writes a head x [C, K] in the block's dtype."""
    if plan.keys_head_major:
        ref[0, head] = x.astype(ref.dtype)
    else:
        ref[0, :, plan.key_columns(head)] = x.astype(ref.dtype)


def read_values(plan: Plan, ref: Ref, head: int) -> Array:
    """The value heads [C, V] of a key head, of a block of `BlockSpecs.values`."""
    if not plan.values_head_major:
        size = plan.layout.value_size
        return ref[0, :, head * size : (head + 1) * size]
    heads = [ref[0, head * plan.group + n] for n in range(plan.group)]
    return heads[0] if plan.group == 1 else jnp.concatenate(heads, 1)


def write_values(plan: Plan, ref: Ref, head: int, x: Array) -> None:
    """Writes the value heads x [C, V] of a key head in the block's dtype."""
    size, width = plan.layout.value_size, plan.value_width
    if not plan.values_head_major:
        ref[0, :, head * size : (head + 1) * size] = x.astype(ref.dtype)
        return
    for n in range(plan.group):
        ref[0, head * plan.group + n] = x[:, n * width : (n + 1) * width].astype(ref.dtype)


def compiler_params(*, few_registers: bool) -> pltpu.CompilerParams:
    """few_registers asks for the compiler's other scheduler, which keeps fewer values at a time:
    half the spills, and in a forward kernel 7 % more cycles (LAB_LOG.md)."""
    # Blocks and scratch take 1 to 3 MiB a head, most of it operands of the levels; a v5e has
    # 128 MiB of vector memory, of which a kernel gets 16 unless it asks.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=100 * 2**20,
        flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True} if few_registers else None,
    )
