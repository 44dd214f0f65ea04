# SPDX-License-Identifier: Apache-2.0
"""The kernel audit: accuracy, identities, static schedules beside the peers, and times.

Every function returns rows (dictionaries) or a figure and keeps what failed; none needs a TPU,
except to time the TPU kernels.
"""

from atomic_kernels.audit.accuracy import accuracy_rows
from atomic_kernels.audit.figures import comparison_figure
from atomic_kernels.audit.identities import causality_rows, split_rows
from atomic_kernels.audit.schedules import (
    compare_schedules,
    compared_programs,
    comparison_row,
    memory_against_length,
)
from atomic_kernels.audit.timing import timing_rows

__all__ = [
    "accuracy_rows",
    "causality_rows",
    "compare_schedules",
    "compared_programs",
    "comparison_figure",
    "comparison_row",
    "memory_against_length",
    "split_rows",
    "timing_rows",
]
