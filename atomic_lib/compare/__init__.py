# SPDX-License-Identifier: Apache-2.0
"""Compares trained architectures at common steps, with their seeds. Needs no jax."""

from atomic_lib.compare.runs import compare
from atomic_lib.compare.statistics import Comparison, Curve, compare_curves, mean_and_sd

__all__ = ["Comparison", "Curve", "compare", "compare_curves", "mean_and_sd"]
