# SPDX-License-Identifier: Apache-2.0
"""What a compiled program's schedule says, as plain data: per operation and for the program.

All times are static: bundles at the chip's clock, with no stall on memory transfers, and every
predicated region counted as taken. They compare kernels; they are not measurements.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atomic_kernels.schedule.bundles import Loop
from atomic_kernels.schedule.chips import CHIPS, Chip


@dataclass(frozen=True, kw_only=True)
class UnitUse:
    """Use of one unit over an operation: busy slots of those its cycles offer.

    busy_slots and slots are weighted by trip counts (loops of unknown count once). A capacity of
    3 loads a bundle offers 3 slots a cycle.
    """

    unit: str
    capacity: int
    busy_slots: int
    slots: int

    @property
    def fraction(self) -> float:
        """Busy part of the unit, 0 to 1."""
        return self.busy_slots / self.slots if self.slots else 0.0


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """Use of each unit over one trip of a loop, in equal slices of its bundles.

    fractions[unit][slice] is 0 to 1; bundles is the length of the trip, waits included.
    """

    units: tuple[str, ...]
    bundles: int
    fractions: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One scheduled HLO instruction: a Pallas kernel, a fusion, a copy or another.

    kind             "pallas", "fusion", "copy" (copy, transpose, reshape and their fusions),
                     "transfer" (asynchronous, between HBM and VMEM), "collective" or "other".
    executions       runs in one call of the program; None where a loop's count is not known.
    bundles          length of its program; None where the compiler left no schedule.
    cycles           issued bundles of one run; None where a loop's count is not known.
    cycles_at_least  the same with loops of unknown count taken once: a lower bound.
    stall_cycles     cycles that `cycles` leaves out: waits on results (matrix unit, transposes)
                     that the hardware inserts itself; None as for cycles.
    estimated_cycles XLA's own estimate for a fusion; None for a kernel.
    vmem_bytes       scoped VMEM of the operation, its pipelined windows and scratch included.
    hbm_bytes        operands and results in HBM, each once.
    matmul_cycles    cycles that the issued matrix products hold the matrix units at full rate.
    profile          use of the units over one trip of the main loop, waits included.
    """

    name: str
    kind: str
    opcode: str
    source: str
    executions: int | None
    bundles: int | None
    cycles: int | None
    cycles_at_least: int | None
    stall_cycles: int | None
    estimated_cycles: int | None
    vmem_bytes: int | None
    hbm_bytes: int
    matmul_cycles: int | None
    loops: tuple[Loop, ...] = ()
    units: tuple[UnitUse, ...] = ()
    main_loop_units: tuple[UnitUse, ...] = ()
    profile: UnitProfile | None = None

    @property
    def unknown_loops(self) -> int:
        """How many loops have a trip count that the compiler does not know."""
        return sum(loop.trips is None for loop in self.loops)

    def unit(self, name: str) -> UnitUse:
        """The use of the named unit. Raises ValueError when the schedule has no such unit."""
        for use in self.units:
            if use.unit == name:
                return use
        raise ValueError(f"unit: {name!r} is none of {[use.unit for use in self.units]}")

    @property
    def spills_and_fills_per_bundle(self) -> float | None:
        """Vector register spills (stores) and fills (loads) per bundle of the main loop."""
        moved = [u for u in self.main_loop_units if u.unit in ("VLOAD:FILL", "VSTORE:SPILL")]
        if not moved:
            return None
        cycles = moved[0].slots // moved[0].capacity
        return sum(use.busy_slots for use in moved) / cycles if cycles else 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """The schedule of one compiled program on one chip of a topology."""

    target: str
    arguments: dict[str, Any]
    topology: str
    devices: int
    device_kind: str
    jax_version: str
    libtpu_version: str
    compile_seconds: float
    memory: dict[str, int]
    operations: tuple[Operation, ...] = field(default=())

    @property
    def chip(self) -> Chip:
        """The chip that the times refer to."""
        return CHIPS[self.topology.partition(":")[0]]

    @property
    def kernels(self) -> tuple[Operation, ...]:
        """The Pallas kernels, in program order."""
        return tuple(item for item in self.operations if item.kind == "pallas")

    @property
    def others(self) -> tuple[Operation, ...]:
        """Everything that is not a Pallas kernel, in program order."""
        return tuple(item for item in self.operations if item.kind != "pallas")

    @property
    def copies(self) -> tuple[Operation, ...]:
        """Copies, transposes and layout changes of arrays in HBM."""
        return tuple(item for item in self.operations if item.kind == "copy")

    def milliseconds(self, cycles: float | None) -> float | None:
        """`cycles` at the chip's clock in ms; None stays None."""
        return None if cycles is None else 1e3 * self.chip.seconds(cycles)

    @property
    def cycles(self) -> int | None:
        """Static cycles of one call; None when any operation's count is not known."""
        return total_cycles(self.operations)

    @property
    def kernel_cycles(self) -> int | None:
        """Static cycles of the Pallas kernels alone; None when a count is not known."""
        return total_cycles(self.kernels)

    @property
    def cycles_with_stalls(self) -> int | None:
        """Cycles of one call with the waits on results; None when a count is not known."""
        total = 0
        for item in self.operations:
            if item.bundles is None and item.kind != "collective":
                continue
            if item.cycles is None or item.stall_cycles is None or item.executions is None:
                return None
            total += (item.cycles + item.stall_cycles) * item.executions
        return total

    @property
    def matmul_cycles(self) -> int | None:
        """Cycles that the kernels' matrix products hold the units; None when not known."""
        total = 0
        for item in self.kernels:
            if item.matmul_cycles is None or item.executions is None:
                return None
            total += item.matmul_cycles * item.executions
        return total

    def passes_outside_kernels(self, minimum_bytes: int = 2**20) -> tuple[Operation, ...]:
        """What moves at least `minimum_bytes` of HBM outside the kernels: passes, copies, all.

        Empty for a program whose kernels take the arrays as they are. Transfers that the
        compiler starts ahead of a kernel, in the kernel's place, are left out.
        """
        return tuple(
            item
            for item in self.others
            if item.kind != "transfer" and item.hbm_bytes >= minimum_bytes
        )

    @property
    def cycles_at_least(self) -> int:
        """Static cycles with every unknown count taken as one: a lower bound."""
        return sum(
            (item.cycles_at_least or 0) * (1 if item.executions is None else item.executions)
            for item in self.operations
        )

    def byte_floor_ms(self, operation: Operation) -> float:
        """Time to move the operation's HBM bytes once at the chip's peak, in ms."""
        return 1e3 * operation.hbm_bytes / self.chip.hbm_bytes_per_second

    def to_json(self) -> str:
        """The report as JSON, read back by `ScheduleReport.from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ScheduleReport:
        """The report that `to_json` wrote."""
        values = json.loads(text)
        values["operations"] = tuple(_operation(item) for item in values["operations"])
        return ScheduleReport(**values)

    def save(self, path: str | Path) -> None:
        """Writes the JSON to `path` through a temporary name, so that it is whole or absent."""
        write_whole(Path(path), self.to_json() + "\n")


def _operation(values: dict[str, Any]) -> Operation:
    return Operation(
        **{
            **values,
            "loops": tuple(Loop(**loop) for loop in values["loops"]),
            "units": tuple(UnitUse(**use) for use in values["units"]),
            "main_loop_units": tuple(UnitUse(**use) for use in values["main_loop_units"]),
            "profile": _profile(values["profile"]),
        }
    )


def _profile(values: dict[str, Any] | None) -> UnitProfile | None:
    if values is None:
        return None
    return UnitProfile(
        units=tuple(values["units"]),
        bundles=values["bundles"],
        fractions=tuple(tuple(row) for row in values["fractions"]),
    )


def total_cycles(operations: tuple[Operation, ...]) -> int | None:
    """Cycles of all runs of `operations`; None when one of them is not known.

    An operation without a schedule of its own (a scalar instruction of the outer program, or a
    transfer that overlaps with it) adds nothing; a collective without one is not known.
    """
    total = 0
    for item in operations:
        if item.bundles is None and item.kind != "collective":
            continue
        if item.cycles is None or item.executions is None:
            return None
        total += item.cycles * item.executions
    return total


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path`: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
