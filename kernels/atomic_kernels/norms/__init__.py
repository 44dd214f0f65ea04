# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm for TPU, one pass each way, with the sums before them."""

from atomic_kernels.norms.tpu import add_and_normalise, normalise

__all__ = ["add_and_normalise", "normalise"]
