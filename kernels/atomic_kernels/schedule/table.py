# SPDX-License-Identifier: Apache-2.0
"""A ScheduleReport as rows and as a text table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atomic_kernels.schedule.report import Operation, ScheduleReport

UNKNOWN = "unknown"


def operation_row(report: ScheduleReport, operation: Operation) -> dict[str, Any]:
    """The operation's numbers, units in the names; None where not known or not applicable.

    Times and ratios are of one run. floor_ratio is the static time over the larger of the two
    floors: 1 means that the schedule is as short as the bytes or the matrix products allow, less
    that transfers, which no schedule counts, take longer. bound_ms is the most that is known:
    the larger of the schedule with its stalls and the byte floor.
    """
    static_ms = report.milliseconds(operation.cycles)
    byte_floor_ms = report.byte_floor_ms(operation)
    matmul_floor_ms = report.milliseconds(operation.matmul_cycles)
    floor_ms = max(byte_floor_ms, matmul_floor_ms or 0.0)
    stalled = None
    if operation.cycles is not None and operation.stall_cycles is not None:
        stalled = report.milliseconds(operation.cycles + operation.stall_cycles)
    return {
        "name": operation.name,
        "kind": operation.kind,
        "runs": operation.executions,
        "bundles": operation.bundles,
        "cycles": operation.cycles,
        "cycles_at_least": operation.cycles_at_least,
        "unknown_loops": operation.unknown_loops,
        "static_ms": static_ms,
        "static_with_stalls_ms": stalled,
        "xla_estimate_ms": report.milliseconds(operation.estimated_cycles),
        "byte_floor_ms": byte_floor_ms,
        "matmul_floor_ms": matmul_floor_ms,
        "bound_ms": None if stalled is None else max(stalled, byte_floor_ms),
        "floor_ratio": static_ms / floor_ms if static_ms is not None and floor_ms else None,
        "spills_and_fills_per_bundle": operation.spills_and_fills_per_bundle,
        "vmem_mib": None if operation.vmem_bytes is None else operation.vmem_bytes / 2**20,
        "hbm_mb": operation.hbm_bytes / 1e6,
        **{f"use_{use.unit}": use.fraction for use in operation.main_loop_units},
    }


def operation_rows(report: ScheduleReport) -> list[dict[str, Any]]:
    """One row an operation, in program order."""
    return [operation_row(report, operation) for operation in report.operations]


def report_table(report: ScheduleReport) -> str:
    """The report as text: the program, its kernels, what runs around them, and unit use."""
    lines = [
        f"{report.target} {report.arguments or ''}".rstrip(),
        f"{report.topology} ({report.device_kind}), {report.devices} chip(s), jax "
        f"{report.jax_version}, libtpu {report.libtpu_version}, compiled in "
        f"{report.compile_seconds:.1f} s",
        _total_line(report),
        "HBM a chip: "
        + ", ".join(f"{name[:-6]} {size / 2**20:.1f} MiB" for name, size in report.memory.items()),
        "",
    ]
    shown = [item for item in report.operations if item.bundles is not None or item.hbm_bytes]
    rows = [operation_row(report, item) for item in shown]
    lines += _aligned(
        ["operation", "kind", "runs", "bundles", "cycles", "static ms", "with stalls", "est. ms",
         "byte floor", "MXU floor", "ratio", "spill+fill", "VMEM MiB", "HBM MB"],
        [
            [row["name"], row["kind"], _count(row["runs"]), _optional(row["bundles"], "d"),
             _cycles(row), _milliseconds(row, "static_ms"),
             _milliseconds(row, "static_with_stalls_ms"), _optional(row["xla_estimate_ms"], ".3f"),
             _optional(row["byte_floor_ms"], ".3f"), _optional(row["matmul_floor_ms"], ".3f"),
             _optional(row["floor_ratio"], ".2f"),
             _optional(row["spills_and_fills_per_bundle"], ".2f"),
             _optional(row["vmem_mib"], ".2f"), f"{row['hbm_mb']:.1f}"]
            for row in rows
        ],
    )  # fmt: skip
    used = [item for item in report.kernels if item.main_loop_units]
    if used:
        units = [use.unit for use in used[0].main_loop_units]
        lines += ["", "Use of the units in each kernel's main loop, per cent of their slots:"]
        lines += _aligned(
            ["kernel", *units],
            [
                [item.name, *(f"{100 * use.fraction:.0f}" for use in item.main_loop_units)]
                for item in used
            ],
        )
    return "\n".join(lines)


def _total_line(report: ScheduleReport) -> str:
    total, kernels = report.cycles, report.kernel_cycles
    if total is None or kernels is None:
        known = report.milliseconds(report.cycles_at_least)
        return (
            f"static time {UNKNOWN}: some trip counts are not known to the compiler; at least "
            f"{known:.3f} ms (each such loop once)"
        )
    return (
        f"static time {report.milliseconds(total):.3f} ms, of which Pallas kernels "
        f"{report.milliseconds(kernels):.3f} ms"
    )


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell; the first two are text, the rest right-aligned."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _cycles(row: dict[str, Any]) -> str:
    if row["bundles"] is None:
        return "-"
    return UNKNOWN if row["cycles"] is None else str(row["cycles"])


def _milliseconds(row: dict[str, Any], name: str) -> str:
    if row["bundles"] is None:
        return "-"
    return UNKNOWN if row[name] is None else f"{row[name]:.3f}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
