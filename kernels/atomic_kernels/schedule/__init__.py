# SPDX-License-Identifier: Apache-2.0
"""Static TPU schedules without a TPU: what the compiler makes of a kernel, cycle by cycle."""

from atomic_kernels.schedule.compiler import (
    ScheduleCompileError,
    ScheduleUnavailableError,
    compile_schedule,
    require_compiler,
)
from atomic_kernels.schedule.report import Operation, ScheduleReport, UnitUse

__all__ = [
    "Operation",
    "ScheduleCompileError",
    "ScheduleReport",
    "ScheduleUnavailableError",
    "UnitUse",
    "compile_schedule",
    "require_compiler",
]
