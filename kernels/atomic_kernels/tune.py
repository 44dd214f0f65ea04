# SPDX-License-Identifier: Apache-2.0
"""Static cycles of the GDN-2 kernels by heads a grid step: the table that `tpu_tiles` reads.

    python -m atomic_kernels.tune             compile the rows that are missing
    python -m atomic_kernels.tune --again     all rows anew: some thirty compiles

Compiled for a v5e without a TPU. What does not fit the chip's vector memory is recorded as null.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atomic_kernels.audit.programs import input_shapes
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.gates import Projections
from atomic_kernels.gdn2.tpu_api import gdn2_tpu
from atomic_kernels.gdn2.tpu_tiles import TABLE_PATH, table_key
from atomic_kernels.schedule.compiler import ScheduleCompileError, compile_schedule
from atomic_kernels.schedule.report import write_whole

LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size, and the heads a step to compile for it."""

    precision: str
    key_size: int = 128
    value_size: int = 128
    projections: bool = False
    chunk_size: int = 128
    heads: tuple[int, ...] = (1, 2, 3, 4, 6, 8)

    @property
    def key(self) -> str:
        """Its name in the table."""
        return table_key(
            precision=self.precision,
            key_size=self.key_size,
            value_size=self.value_size,
            projections=self.projections,
            chunk_size=self.chunk_size,
        )


ROWS = (
    Row(precision="bf16"),
    Row(precision="bf16", projections=True, heads=(2, 4, 6, 8)),
    Row(precision="bf16x3", heads=(1, 2, 3, 4, 6)),
    Row(precision="bf16", chunk_size=64, heads=(2, 4, 8)),
    Row(precision="bf16", key_size=64, value_size=64, heads=(2, 4, 8)),
    Row(precision="bf16", key_size=64, value_size=64, projections=True, heads=(2, 4, 8)),
    Row(precision="bf16", key_size=64, value_size=64, chunk_size=64, heads=(2, 4, 8)),
    Row(precision="bf16", key_size=128, value_size=256, heads=(1, 2, 4)),
    Row(precision="bf16", key_size=256, value_size=256, heads=(1, 2, 4)),
)


def program(
    *,
    precision: str,
    key_size: int,
    value_size: int,
    projections: bool,
    chunk_size: int,
    heads: int,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Forward and backward of one step's heads, as `compile_schedule` takes it."""
    dtype = "bfloat16" if precision == "bf16" else "float32"
    inputs = input_shapes(
        1, LENGTH, heads, key_size, value_size, value_heads=heads, dtype=dtype,
        decay_dtype=dtype if projections else "float32",
    )  # fmt: skip

    def run(inputs: Any, weight: jax.Array) -> Any:
        def output(inputs: Any) -> jax.Array:
            return gdn2_tpu(
                Inputs(*inputs), Projections() if projections else None, (None, None), None, None,
                scale=1.0, chunk_size=chunk_size, precision=precision, interpret=False,
                heads_a_step=heads,
            )[0]  # fmt: skip

        return jax.vjp(output, inputs)[1](weight)

    return run, (inputs, inputs[2])


def measure(row: Row, heads: int) -> dict[str, float | None]:
    """Static cycles a token and head of the two kernels; None where they do not compile."""
    arguments = {
        "precision": row.precision, "key_size": row.key_size, "value_size": row.value_size,
        "projections": row.projections, "chunk_size": row.chunk_size, "heads": heads,
    }  # fmt: skip
    try:
        report = compile_schedule("atomic_kernels.tune:program", arguments=arguments)
    except ScheduleCompileError as error:
        if "vmem" not in str(error).lower():
            raise
        return {"forward": None, "backward": None}
    found = {}
    for kernel in ("forward", "backward"):
        (operation,) = [x for x in report.kernels if f"gdn2_{kernel}" in x.name]
        cycles = operation.cycles
        found[kernel] = None if cycles is None else round(cycles / (LENGTH * heads), 3)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Compiles what is asked for, a row at a time, and keeps the table whole on the disk."""
    parser = argparse.ArgumentParser(prog="python -m atomic_kernels.tune")
    parser.add_argument("--again", action="store_true", help="compile rows that are there, too")
    again = parser.parse_args(words).again
    table = json.loads(TABLE_PATH.read_text()) if TABLE_PATH.exists() else {}
    rows = table.setdefault("cycles_a_token_and_head", {})
    for row in ROWS:
        if row.key in rows and not again:
            continue
        kernels: dict[str, dict[str, float | None]] = {"forward": {}, "backward": {}}
        for heads in row.heads:
            for kernel, cycles in measure(row, heads).items():
                kernels[kernel][str(heads)] = cycles
        rows[row.key] = kernels
        table["command"] = "python -m atomic_kernels.tune --again"
        write_whole(TABLE_PATH, json.dumps(table, indent=1, sort_keys=True) + "\n")
        print(f"{row.key}: {kernels}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
