# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet-2 in JAX: `gdn2` over sequences, `gdn2_step` over one token."""

from atomic_kernels.gdn2.api import (
    BackendChoice,
    describe_backend,
    gdn2,
    gdn2_from_projections,
    gdn2_step,
)
from atomic_kernels.gdn2.gates import decay_gate

__all__ = [
    "BackendChoice",
    "decay_gate",
    "describe_backend",
    "gdn2",
    "gdn2_from_projections",
    "gdn2_step",
]
