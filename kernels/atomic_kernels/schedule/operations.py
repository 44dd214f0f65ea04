# SPDX-License-Identifier: Apache-2.0
"""Joins one HLO instruction with the compiler's texts about it into an Operation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

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
from atomic_kernels.schedule.hlo import Work
from atomic_kernels.schedule.report import Operation, UnitUse

_PALLAS_TARGET = "tpu_custom_call"
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COPY_OPCODES = ("copy", "transpose", "reshape")
_COPY_FUSION = re.compile(r"^(copy|transpose|bitcast)[\w.\-]*fusion")
# A matrix product with its modifiers, e.g. vmatmul.msk.bf16.gmra.mxu2.
_MATMUL = re.compile(r"\bvmatmul\.([\w.]+)")


def operation_from_dump(work: Work, dump: Path, chip: Chip) -> Operation:
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
    texts = _texts(instruction.name, dump)
    if texts is None:
        if base.kind == "pallas":
            raise ScheduleFormatError(
                f"the compiler left no schedule of kernel {instruction.name} in {dump}: report "
                "the libtpu version; this reader needs an update."
            )
        return base
    return with_schedule(base, *texts, chip=chip)


def with_schedule(
    operation: Operation, final: str, packed: str, listing: str, units: str, *, chip: Chip
) -> Operation:
    """The operation with its cycles and unit use from the four texts of its schedule.

    final and packed are the bundles after and before the compiler leaves waits to the hardware,
    listing the region listing, units the unit table of the final bundles.
    """
    bundles, regions = parse_bundles(final), parse_loop_regions(listing)
    loops = find_loops(bundles, regions)
    weights = bundle_weights(len(bundles), loops)
    lower = bundle_weights(len(bundles), loops, unknown_as=1)
    table = parse_units(units)
    if len(table.rows) != len(bundles):
        raise ScheduleFormatError(
            f"{operation.name}: {len(table.rows)} unit rows for {len(bundles)} bundles"
        )
    cycles = _sum(weights)
    return dataclasses.replace(
        operation,
        bundles=len(bundles),
        cycles=cycles,
        cycles_at_least=_sum(lower),
        stall_cycles=_difference(_packed_cycles(packed, regions), cycles),
        matmul_cycles=_matmul_cycles(bundles, loops, table, chip),
        loops=loops,
        units=unit_use(table, lower, 0, len(bundles)),
        main_loop_units=_main_loop_units(table, loops, lower),
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


def _packed_cycles(packed: str, regions: dict[int, int | None]) -> int | None:
    bundles = parse_bundles(packed)
    return _sum(bundle_weights(len(bundles), find_loops(bundles, regions)))


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
    if instruction.opcode == "custom-call":
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        return "pallas" if target == _PALLAS_TARGET else "other"
    if instruction.opcode.startswith(_COLLECTIVES):
        return "collective"
    if instruction.opcode.endswith(("-start", "-done")):
        return "transfer"
    if instruction.opcode in _COPY_OPCODES or _COPY_FUSION.match(instruction.name):
        return "copy"
    return "fusion" if instruction.opcode == "fusion" else "other"


def _texts(name: str, dump: Path) -> tuple[str, str, str, str] | None:
    """The four texts about instruction `name`, None where the compiler wrote none."""
    suffixes = (
        "final_bundles",
        "packed-bundles-post-ra",
        "post-delay-converter",
        "final_hlo-static-per-bundle-utilization",
    )
    found = []
    for suffix in suffixes:
        pattern = re.compile(rf"^\d+-{re.escape(name)}-\d+-{re.escape(suffix)}\.txt$")
        paths = sorted(path for path in dump.iterdir() if pattern.match(path.name))
        if not paths:
            return None
        found.append(paths[-1].read_text())
    final, packed, listing, units = found
    return final, packed, listing, units


def _sum(weights: Sequence[int | None]) -> int | None:
    return None if None in weights else sum(weight or 0 for weight in weights)


def _difference(packed: int | None, final: int | None) -> int | None:
    return None if packed is None or final is None else packed - final
