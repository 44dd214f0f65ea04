# SPDX-License-Identifier: Apache-2.0
"""A run's programs compiled for a TPU that is not there: memory, predicted time, verdict."""

from atomic_lib.aot.compile import AotCompileError, compile_report
from atomic_lib.aot.report import CompileReport, ProgramReport
from atomic_lib.aot.target import AotUnavailableError, Target

__all__ = [
    "AotCompileError",
    "AotUnavailableError",
    "CompileReport",
    "ProgramReport",
    "Target",
    "compile_report",
]
