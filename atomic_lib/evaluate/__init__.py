# SPDX-License-Identifier: Apache-2.0
"""Exported models on the validation split: estimated and exact bits per byte."""

from atomic_lib.evaluate.runs import evaluate
from atomic_lib.evaluate.validation import evaluate_parameters, position_rows

__all__ = [
    "evaluate",
    "evaluate_parameters",
    "position_rows",
]
