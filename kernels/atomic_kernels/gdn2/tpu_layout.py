# SPDX-License-Identifier: Apache-2.0
"""How a chunk lies in TPU vector memory.

A vector register holds 8 rows (sublanes) of 128 lanes. A chunk of C tokens is 8 *runs* of
n = C / 8 consecutive tokens; token t = n s + r is step r of run s. Two views of one array:

    in order   run after run: row n s + r
    by steps   step after step: row 8 r + s, so that a step of all runs is one register

Whatever pairs tokens less than n apart works by steps: a half of the rows is then a choice of
registers, not a mask. Whatever pairs runs works in order, for the same reason. An array that is
seen both ways lies in a scratch of 8 (n + 4) rows, run s from row s (n + 4): rows with a common
stride can be read 8 at once only if the stride is not a multiple of 8 (32 memory banks; stride
16 takes 4 accesses), and n + 4 = 20 or 12 is none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2.arithmetic import Operand, Rounding

# A reference to vector memory; Pallas has no public type for it.
Ref = Any

SUBLANES = 8
LANES = 128
STRIDE_PAD = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of one chunk and one head, and the parts of its operands (`arithmetic`)."""

    chunk: int  # C, 64 or 128
    key_size: int  # K
    value_size: int  # V, all value heads of the key head together
    parts: int
    interpret: bool | pltpu.InterpretParams

    @property
    def rounding(self) -> Rounding:
        return Rounding(parts=self.parts, by_casts=not self.interpret)

    @property
    def run(self) -> int:
        """Tokens of a run."""
        return self.chunk // SUBLANES

    @property
    def pitch(self) -> int:
        """Rows from one run to the next in a scratch that is read both ways."""
        return self.run + STRIDE_PAD

    @property
    def low_levels(self) -> int:
        """Levels whose pairs lie within a run: half sizes 1, 2, .. run / 2."""
        return self.run.bit_length() - 1

    def padded(self, width: int) -> tuple[int, int, int]:
        """Shape of a scratch that is read as steps and as runs: [lane tiles, rows, lanes]."""
        lanes = min(width, LANES)
        return width // lanes, SUBLANES * self.pitch, lanes

    def pin(self, x: Array) -> Array:
        """x, kept by the interpreter's compiler as one value: fused into each of its many uses,
        a chain of such values grows exponentially."""
        return lax.optimization_barrier(x) if self.interpret else x


def row_numbers(rows: int, columns: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 0)


def column_numbers(rows: int, columns: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 1)


# Memory access: everything below takes a reference [lane tiles, 8 pitch, lanes] ------------------


def read_steps(ref: Ref, layout: Layout) -> Array:
    """All tokens [C, D], step after step: token n s + r is row 8 r + s."""
    if layout.interpret:
        tiles = [_runs_of(ref[t], layout).swapaxes(0, 1) for t in range(ref.shape[0])]
        return _join([x.reshape(layout.chunk, -1) for x in tiles])
    steps = [
        [ref.at[t][_step(r, layout), :] for r in range(layout.run)] for t in range(ref.shape[0])
    ]
    return _join([jnp.concatenate(x, 0) for x in steps])


def write_steps(ref: Ref, x: Array, layout: Layout, changed: Sequence[int] | None = None) -> None:
    """Writes x [C, D], step after step; only the steps `changed` differ from what is there."""
    lanes = ref.shape[-1]
    for t in range(ref.shape[0]):
        part = x[:, t * lanes : (t + 1) * lanes]
        if layout.interpret:
            # One whole write: the interpreter makes a scatter, slow to compile, of a strided one.
            runs = part.reshape(layout.run, SUBLANES, lanes).swapaxes(0, 1)
            ref[t] = _with_padding(runs, layout)
        else:
            for r in range(layout.run) if changed is None else changed:
                ref.at[t][_step(r, layout), :] = part[r * SUBLANES : (r + 1) * SUBLANES]


def read_rows(ref: Ref, layout: Layout) -> Array:
    """All tokens in order [C, D]."""
    if layout.interpret:
        tiles = [_runs_of(ref[t], layout) for t in range(ref.shape[0])]
        return _join([x.reshape(layout.chunk, -1) for x in tiles])
    return jnp.concatenate([_read_run(ref, s, layout) for s in range(SUBLANES)], 0)


def write_rows(ref: Ref, x: Array, layout: Layout, changed: Sequence[int] | None = None) -> None:
    """Writes x [C, D], tokens in order; only the runs `changed` differ from what is there."""
    lanes = ref.shape[-1]
    for t in range(ref.shape[0]):
        part = x[:, t * lanes : (t + 1) * lanes]
        if layout.interpret:
            ref[t] = _with_padding(part.reshape(SUBLANES, layout.run, lanes), layout)
        else:
            for s in range(SUBLANES) if changed is None else changed:
                ref[t, _run(s, layout)] = part[s * layout.run : (s + 1) * layout.run]


def write_parts(ref: Ref, rows: slice, parts: Operand) -> None:
    """Writes an operand's parts [rows, D] into ref [parts, C, D]."""
    for n, part in enumerate(parts):
        ref[n, rows] = part


def read_parts(ref: Ref, rows: slice = slice(None), *, count: int | None = None) -> Operand:
    """The parts, or the first `count` of them."""
    return tuple(ref[n, rows] for n in range(count or ref.shape[0]))


def _read_run(ref: Ref, s: int, layout: Layout) -> Array:
    return _join([ref[t, _run(s, layout)] for t in range(ref.shape[0])])


def _step(r: int, layout: Layout):
    return pl.ds(r, SUBLANES, stride=layout.pitch)


def _run(s: int, layout: Layout) -> slice:
    return slice(s * layout.pitch, s * layout.pitch + layout.run)


def _runs_of(padded: Array, layout: Layout) -> Array:
    return padded.reshape(SUBLANES, layout.pitch, -1)[:, : layout.run]


def _with_padding(runs: Array, layout: Layout) -> Array:
    padding = jnp.zeros((SUBLANES, STRIDE_PAD, runs.shape[-1]), runs.dtype)
    return jnp.concatenate([runs, padding], 1).reshape(-1, runs.shape[-1])


def _join(tiles: list[Array]) -> Array:
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, 1)
