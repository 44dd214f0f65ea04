# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm for TPU, forward and backward in one pass each."""

from atomic_kernels.norms.tpu import normalise

__all__ = ["normalise"]
