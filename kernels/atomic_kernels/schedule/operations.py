# SPDX-License-Identifier: Apache-2.0
"""Joins one HLO instruction with the compiler's texts about it into an Operation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import pairwise

from atomic_kernels.schedule.bundles import (
    Bundle,
    Loop,
    ScheduleFormatError,
    UnitTable,
    bundle_weights,
    find_loops,
    parse_bundles,
    parse_loop_regions,
    parse_units,
)
from atomic_kernels.schedule.chips import Chip
from atomic_kernels.schedule.dump import Dump, ScheduleTexts
from atomic_kernels.schedule.hlo import Work
from atomic_kernels.schedule.report import Operation, UnitProfile, UnitUse

_PALLAS_TARGET = "tpu_custom_call"
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COPY_OPCODES = frozenset(["copy", "transpose", "reshape", "bitcast-convert"])
# A matrix product with its modifiers, e.g. vmatmul.msk.bf16.gmra.mxu2.
_MATMUL = re.compile(r"\bvmatmul\.([\w.]+)")


def operation_from_dump(work: Work, dump: Dump, chip: Chip) -> Operation:
    """The operation of one scheduled HLO instruction, with its schedule where `dump` has one."""
    instruction = work.instruction
    estimated = instruction.attribute(r'"estimated_cycles":"(\d+)"')
    vmem = re.search(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"',
        instruction.attributes,
    )
    base = Operation(
        name=instruction.name,
        kind=_kind(work),
        opcode=instruction.opcode,
        source=instruction.attribute(r'op_name="([^"]*)"') or "",
        executions=work.executions,
        bundles=None,
        cycles=None,
        cycles_at_least=None,
        stall_cycles=None,
        estimated_cycles=int(estimated) if estimated else None,
        vmem_bytes=int(vmem.group(1)) if vmem else None,
        hbm_bytes=work.hbm_bytes,
        matmul_cycles=None,
    )
    texts = dump.texts(instruction.name)
    if texts is None:
        if base.kind == "pallas":
            raise ScheduleFormatError(
                f"the compiler left no schedule of kernel {instruction.name} in {dump.folder}: "
                "report the libtpu version; this reader needs an update."
            )
        return base
    return with_schedule(base, texts, chip)


def with_schedule(operation: Operation, texts: ScheduleTexts, chip: Chip) -> Operation:
    """The operation with its cycles, unit use and profile from the texts of its schedule.

    Raises ScheduleFormatError when the texts disagree or have another form.
    """
    regions = parse_loop_regions(texts.listing)
    bundles, loops, table = _read(operation.name, texts.final, texts.final_units, regions)
    packed, packed_loops, packed_table = _read(
        operation.name, texts.packed, texts.packed_units, regions
    )
    lower = bundle_weights(len(bundles), loops, unknown_as=1)
    cycles = _sum(bundle_weights(len(bundles), loops))
    packed_cycles = _sum(bundle_weights(len(packed), packed_loops))
    return dataclasses.replace(
        operation,
        bundles=len(bundles),
        cycles=cycles,
        cycles_at_least=_sum(lower),
        stall_cycles=_difference(packed_cycles, cycles),
        matmul_cycles=_matmul_cycles(bundles, loops, table, chip),
        loops=loops,
        units=unit_use(table, lower, 0, len(bundles)),
        main_loop_units=_main_loop_units(table, loops, lower),
        profile=unit_profile(packed_table, packed_loops),
    )


def _read(
    name: str, bundle_text: str, unit_text: str, regions: dict[int, int | None]
) -> tuple[tuple[Bundle, ...], tuple[Loop, ...], UnitTable]:
    bundles, table = parse_bundles(bundle_text), parse_units(unit_text)
    if len(table.rows) != len(bundles):
        raise ScheduleFormatError(
            f"{name}: {len(table.rows)} rows of unit use for {len(bundles)} bundles: report the "
            "libtpu version; this reader needs an update."
        )
    return bundles, find_loops(bundles, regions), table


# Slices of a profile: as many as a figure of usual width can show apart.
PROFILE_SLICES = 160


def unit_profile(table: UnitTable, loops: Sequence[Loop]) -> UnitProfile:
    """Use of the units over one trip of the main loop (of the program where it has none).

    Inner loops count once, so a slice shows what the units do there, not for how long.
    """
    count = len(table.rows)
    loop = main_loop(loops, bundle_weights(count, tuple(loops), unknown_as=1))
    rows = table.rows if loop is None else table.rows[loop.start : loop.stop]
    slices = min(PROFILE_SLICES, len(rows))
    edges = [len(rows) * index // slices for index in range(slices + 1)]
    return UnitProfile(
        units=table.units,
        bundles=len(rows),
        fractions=tuple(
            tuple(
                sum(row[unit] for row in rows[first:last]) / (capacity * (last - first))
                for first, last in pairwise(edges)
            )
            for unit, capacity in enumerate(table.capacity)
        ),
    )


def unit_use(
    table: UnitTable, weights: Sequence[int | None], start: int, stop: int
) -> tuple[UnitUse, ...]:
    """Weighted use of each unit over bundles [start, stop)."""
    cycles = sum(weight or 0 for weight in weights[start:stop])
    return tuple(
        UnitUse(
            unit=unit,
            capacity=table.capacity[column],
            busy_slots=sum(
                table.rows[index][column] * (weights[index] or 0) for index in range(start, stop)
            ),
            slots=cycles * table.capacity[column],
        )
        for column, unit in enumerate(table.units)
    )


def main_loop(loops: Sequence[Loop], weights: Sequence[int | None]) -> Loop | None:
    """The outermost loop that holds most cycles, None for a program without loops."""
    outer = [loop for loop in loops if loop.depth == 1]
    return max(
        outer, key=lambda loop: sum(w or 0 for w in weights[loop.start : loop.stop]), default=None
    )


def _main_loop_units(
    table: UnitTable, loops: Sequence[Loop], weights: Sequence[int | None]
) -> tuple[UnitUse, ...]:
    loop = main_loop(loops, weights)
    return () if loop is None else unit_use(table, weights, loop.start, loop.stop)


def _matmul_cycles(
    bundles: Sequence[Bundle], loops: tuple[Loop, ...], table: UnitTable, chip: Chip
) -> int | None:
    """Cycles of all matrix products spread evenly over the units.

    None where a loop's count or the operand format of a product is not known.
    """
    total = 0
    weights = bundle_weights(len(bundles), loops, without_fill=True)
    for bundle, weight in zip(bundles, weights, strict=True):
        for modifiers in _MATMUL.findall(bundle.text):
            hold = [
                chip.matmul_hold_cycles[part]
                for part in modifiers.split(".")
                if part in chip.matmul_hold_cycles
            ]
            if not hold or weight is None:
                return None
            total += hold[0] * weight
    return total // table.capacity[table.units.index("MXU")]


def _kind(work: Work) -> str:
    instruction = work.instruction
    opcodes = work.fused or {instruction.opcode}
    if instruction.opcode == "custom-call":
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        return "pallas" if target == _PALLAS_TARGET else "other"
    if any(opcode.startswith(_COLLECTIVES) for opcode in opcodes):
        return "collective"
    if instruction.opcode.endswith(("-start", "-done")):
        return "transfer"
    if opcodes <= _COPY_OPCODES:
        return "copy"
    return "fusion" if instruction.opcode == "fusion" else "other"


def _sum(weights: Sequence[int | None]) -> int | None:
    return None if None in weights else sum(weight or 0 for weight in weights)


def _difference(packed: int | None, final: int | None) -> int | None:
    return None if packed is None or final is None else packed - final
