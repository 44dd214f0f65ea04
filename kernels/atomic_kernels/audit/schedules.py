# SPDX-License-Identifier: Apache-2.0
"""Static schedules of ours beside the peers', compiled in the same run by the same compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atomic_kernels.schedule import (
    ScheduleCompileError,
    ScheduleReport,
    compile_schedule,
    require_compiler,
)

PROGRAMS = "atomic_kernels.audit.programs"


@dataclass(frozen=True, kw_only=True)
class ComparedProgram:
    """One line of the comparison: whose it is, in which precision, and the factory's arguments."""

    implementation: str
    dtype: str
    direction: str
    program: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ComparedSchedule:
    """A compiled line: its report, or why there is none (failed lines are kept)."""

    compared: ComparedProgram
    report: ScheduleReport | None
    failure: str | None = None


def compared_programs(
    *, B: int = 8, T: int = 4096, H: int = 6, K: int = 128, peers: bool = True
) -> list[ComparedProgram]:
    """Ours in bfloat16 and float32 and, with `peers`, both packages of atomic-ops 0.2.0."""
    shape = {"B": B, "T": T, "H": H, "K": K}
    lines = [
        ComparedProgram(
            implementation="atomic_kernels.gdn2",
            dtype=dtype,
            direction=direction,
            program=direction,
            arguments={**shape, "V": K, "dtype": dtype},
        )
        for dtype in ("bfloat16", "float32")
        for direction in ("forward", "training")
    ]
    if peers:
        lines += [
            ComparedProgram(
                implementation=package,
                dtype="float32",
                direction=direction,
                program=f"{package}_{direction}",
                arguments=shape,
            )
            for package in ("atomic_gdn2", "atomic_ops")
            for direction in ("forward", "training")
        ]
    return lines


def compare_schedules(
    programs: Sequence[ComparedProgram], *, topology: str = "v5e:2x4"
) -> Iterator[ComparedSchedule]:
    """Compiles each program in turn and yields its schedule as soon as it is there.

    A program that does not compile (a peer that is not installed, or that this jax no longer
    supports) is yielded with the reason. Raises ScheduleUnavailableError at once where no TPU
    compiler can run. Compile time grows with the kernels: seconds to a few minutes each.
    """
    require_compiler()
    for compared in programs:
        try:
            report = compile_schedule(
                f"{PROGRAMS}:{compared.program}",
                arguments=compared.arguments,
                topology=topology,
            )
        except ScheduleCompileError as error:
            yield ComparedSchedule(compared=compared, report=None, failure=str(error))
        else:
            yield ComparedSchedule(compared=compared, report=report)


def comparison_row(schedule: ComparedSchedule) -> dict[str, Any]:
    """One line as a row: times in ms for the whole program, None where not known.

    static_ms is kernels_ms plus passes_ms, the XLA passes around the kernels; at_least_ms takes
    loops of unknown count once. byte_floor_ms sums the kernels' operands and results once each.
    """
    compared, report = schedule.compared, schedule.report
    row: dict[str, Any] = {
        "implementation": compared.implementation,
        "dtype": compared.dtype,
        "direction": compared.direction,
        **{name: compared.arguments.get(name) for name in ("B", "T", "H", "K")},
    }
    if report is None:
        return {**row, "failure": schedule.failure}
    kernels, total = report.kernel_cycles, report.cycles
    passes = None if kernels is None or total is None else total - kernels
    return {
        **row,
        "static_ms": report.milliseconds(total),
        "kernels_ms": report.milliseconds(kernels),
        "passes_ms": report.milliseconds(passes),
        "with_stalls_ms": report.milliseconds(report.cycles_with_stalls),
        "at_least_ms": report.milliseconds(report.cycles_at_least),
        "byte_floor_ms": sum(map(report.byte_floor_ms, report.kernels)),
        "matmul_floor_ms": report.milliseconds(report.matmul_cycles),
        "vmem_mib": max((item.vmem_bytes or 0) for item in report.kernels) / 2**20,
        "spills_and_fills_per_bundle": max(
            (item.spills_and_fills_per_bundle or 0.0) for item in report.kernels
        ),
        "compile_seconds": report.compile_seconds,
        "topology": report.topology,
        "libtpu": report.libtpu_version,
        "failure": None,
    }


def memory_against_length(
    lengths: Sequence[int] = (2048, 131_072),
    *,
    direction: str = "training",
    topology: str = "v5e:2x4",
    **shape: Any,
) -> list[dict[str, Any]]:
    """VMEM, HBM and compile time of one program at several lengths, one row a length.

    VMEM and compile time must not depend on T; HBM grows with it. shape is what
    `programs.forward` takes beside T; B is 1 by default. Raises as `compile_schedule` does.
    """
    rows = []
    for length in lengths:
        report = compile_schedule(
            f"{PROGRAMS}:{direction}",
            arguments={"B": 1, **shape, "T": length},
            topology=topology,
        )
        rows.append(
            {
                "T": length,
                "vmem_mib": max((item.vmem_bytes or 0) for item in report.kernels) / 2**20,
                "hbm_arguments_mib": report.memory["argument_bytes"] / 2**20,
                "hbm_outputs_mib": report.memory["output_bytes"] / 2**20,
                "hbm_temporaries_mib": report.memory["temp_bytes"] / 2**20,
                "compile_seconds": report.compile_seconds,
                "static_ms": report.milliseconds(report.cycles),
            }
        )
    return rows
