# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a compiled program on one chip, instruction by instruction.

    fusion, copy      XLA's estimated_cycles / clock; without an estimate, bytes / ASSUMED_HBM
    Pallas kernel     the larger of its static schedule with the waits that the compiler foresees
                      / clock, and its bytes / ASSUMED_HBM
    collective        bytes that leave a chip / ASSUMED_LINK, less the work between its start and
                      its end where it is asynchronous
    loop              its body times its trip count

Nothing here is measured. XLA's estimate is near for matrix products (88 to 100 us where 87 is the
floor) and pessimistic for passes over memory (it implies 213 to 470 GB/s), so each time comes with
`at_bandwidth`: the same, with everything but matrix products and kernels at bytes / ASSUMED_HBM
where that is less, and kernels without their waits. The truth should lie between the two.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atomic_kernels.schedule.chips import Chip
from atomic_kernels.schedule.hlo import HloModule, Instruction, Work, hbm_bytes

from atomic_lib.aot.kernels import KernelSchedule, kernel_key
from atomic_lib.aot.parts import PARTS, part_of

# Of the published peak; 700 GB/s on v5e. Our assumption for a long, regular pass.
ASSUMED_HBM_FRACTION = 0.855
# Bytes a second that a chip sends around a two-way ring on a 2 x 4 slice. Our assumption.
ASSUMED_LINK_BYTES_PER_SECOND = 90e9

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start|-done)?$"
)
_CHAIN_ENDS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "end"}
_MATRIX_PRODUCTS = ("convolution", "dot")
_ESTIMATE = r'"estimated_cycles":"(\d+)"'


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time of one instruction in one call of the program, all its executions together."""

    name: str
    part: str
    kind: str  # "kernel", "matrix product", "collective" or "pass"
    op_name: str
    executions: int
    seconds: float
    seconds_at_bandwidth: float
    bytes: int  # through HBM, or over the links for a collective


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """Predicted time of one part of a step, in milliseconds."""

    part: str
    milliseconds: float
    milliseconds_at_bandwidth: float
    instructions: int


def ring_bytes(opcode: str, result_bytes: int, devices: int) -> float:
    """Bytes that each chip of a ring of `devices` sends for a collective with this result."""
    share = (devices - 1) / devices
    return {
        "all-reduce": 2 * share * result_bytes,
        "all-gather": share * result_bytes,
        "reduce-scatter": share * result_bytes * devices,
        "all-to-all": share * result_bytes,
        "collective-permute": float(result_bytes),
    }[opcode]


class ProgramCosts:
    """The costs of a compiled module.

    `schedules` has each Pallas kernel of the module by `kernels.kernel_key`. Raises ValueError for
    a loop whose trip count the program does not state: its time cannot be predicted.
    """

    def __init__(self, module: HloModule, chip: Chip, schedules: Mapping[str, KernelSchedule]):
        self._module = module
        self._chip = chip
        self._schedules = schedules
        self._memory_rate = ASSUMED_HBM_FRACTION * chip.hbm_bytes_per_second
        self.costs = tuple(self._costs(module.work()))

    def _costs(self, work: Iterable[Work]) -> list[Cost]:
        costs: list[Cost] = []
        open_since: dict[str, int] = {}  # what ties a collective's ends -> its index in `costs`
        for item in work:
            if item.executions is None:
                raise ValueError(
                    f"instruction %{item.instruction.name} runs an unknown number of times; give "
                    "the loop a fixed trip count (lax.scan or fori_loop with a literal bound)"
                )
            collective = self._collective(item.instruction)
            if collective is not None and collective.role == "end":
                index = open_since.pop(collective.tie)
                costs[index] = _hide(costs[index], costs[index + 1 :])
                continue
            cost = self._cost(item.instruction, item.executions, item.hbm_bytes, collective)
            if cost is None:
                continue
            if collective is not None and collective.role == "start":
                open_since[collective.tie] = len(costs)
            costs.append(cost)
        return costs

    def _cost(
        self,
        instruction: Instruction,
        executions: int,
        hbm_size: int,
        collective: "_Collective | None",
    ) -> Cost | None:
        if collective is not None:
            kind, size = "collective", collective.sent
            seconds = at_bandwidth = size / ASSUMED_LINK_BYTES_PER_SECOND
        else:
            size = float(hbm_size)
            by_bytes = size / self._memory_rate
            key = kernel_key(instruction)
            kind = "kernel" if key else self._kind(instruction)
            if key:
                schedule = self._schedules[key]
                with_waits = self._chip.seconds(schedule.cycles + schedule.stall_cycles)
                seconds = max(with_waits, by_bytes)
                at_bandwidth = max(self._chip.seconds(schedule.cycles), by_bytes)
            elif instruction.opcode.endswith(("-start", "-done")):
                return None  # a transfer that overlaps with the work around it
            else:
                estimate = instruction.attribute(_ESTIMATE)
                seconds = self._chip.seconds(int(estimate)) if estimate else by_bytes
                at_bandwidth = seconds if kind == "matrix product" else min(seconds, by_bytes)
        op_name = instruction.attribute(r'op_name="([^"]*)"') or ""
        return Cost(
            name=instruction.name,
            part=part_of(
                op_name,
                is_matrix_product=kind == "matrix product",
                is_collective=kind == "collective",
            ),
            kind=kind,
            op_name=op_name,
            executions=executions,
            seconds=seconds * executions,
            seconds_at_bandwidth=at_bandwidth * executions,
            bytes=round(size) * executions,
        )

    def _kind(self, instruction: Instruction) -> str:
        inner = {item.opcode for item in self._inside(instruction)} | {instruction.opcode}
        return "matrix product" if inner & {*_MATRIX_PRODUCTS} else "pass"

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """Instructions of the computation that a fusion or asynchronous start calls."""
        called = instruction.attribute(r"calls=%([^,\s]+)")
        return self._module.computations.get(called, []) if called else []

    def _collective(self, instruction: Instruction) -> "_Collective | None":
        """What this instruction does of a collective, or None if it is none.

        An asynchronous one is a pair of opcodes (all-gather-start, all-gather-done), or three kinds
        of fusion around the same collective, tied by a chain_id: one that starts it, matrix
        products during which it goes on, and one that ends it.
        """
        inside = self._inside(instruction)
        for item in [instruction, *inside]:
            match = _COLLECTIVE.match(item.opcode)
            if match is None:
                continue
            if match[2] == "-done":
                return _Collective(0.0, "end", instruction.operands[0])
            role, tie = "whole", instruction.name
            if match[2] == "-start":
                role = "start"
            chain = item.attribute(r'chain_id="([^"]*)"')
            if chain is not None:
                targets = {i.attribute(r'custom_call_target="([^"]*)"') for i in inside}
                role = next((_CHAIN_ENDS[t] for t in targets if t in _CHAIN_ENDS), "")
                tie = f"chain {chain}"
                if not role:
                    return None
            # The compiler writes a reduce-scatter as an all-reduce whose result is cut.
            cut = match[1] == "all-reduce" and any(i.opcode == "dynamic-slice" for i in inside)
            sent = ring_bytes(match[1], _result_bytes(item, match), _devices(item))
            return _Collective(sent / 2 if cut else sent, role, tie)
        return None


class _Collective(NamedTuple):
    sent: float  # bytes that a chip sends
    role: str  # "whole", "start" or "end"
    tie: str  # equal for a start and its end


def _result_bytes(instruction: Instruction, match: re.Match) -> int:
    """Bytes of a collective's result, in whatever memory it lies."""
    result = hbm_bytes(re.sub(r"S\(\d+\)", "", instruction.shape))
    if match[2] == "-start" and match[1] == "all-gather":
        # Its result names both ends: (operand, gathered array).
        devices = _devices(instruction)
        result = round(result * devices / (devices + 1))
    return result


def _hide(cost: Cost, between: list[Cost]) -> Cost:
    """The asynchronous collective with only the time that the work in between does not cover."""
    covered = sum(item.seconds for item in between if item.kind != "collective")
    covered_at_bandwidth = sum(
        item.seconds_at_bandwidth for item in between if item.kind != "collective"
    )
    return Cost(
        **{
            **cost.__dict__,
            "seconds": max(0.0, cost.seconds - covered),
            "seconds_at_bandwidth": max(0.0, cost.seconds_at_bandwidth - covered_at_bandwidth),
        }
    )


def _devices(instruction: Instruction) -> int:
    """Devices of one group: replica_groups={{0,1,..},..}, or its short form [groups,devices]."""
    listed = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
    if listed:
        return len(listed.split(","))
    short = instruction.attribute(r"replica_groups=\[\d+,(\d+)\]")
    return int(short) if short else 2


def part_times(costs: Iterable[Cost]) -> tuple[PartTime, ...]:
    """The times by part, in the order of `PARTS`; parts without an instruction are left out."""
    listed = tuple(costs)
    return tuple(
        PartTime(
            part=part,
            milliseconds=1e3 * sum(cost.seconds for cost in own),
            milliseconds_at_bandwidth=1e3 * sum(cost.seconds_at_bandwidth for cost in own),
            instructions=len(own),
        )
        for part in PARTS
        if (own := [cost for cost in listed if cost.part == part])
    )
