# SPDX-License-Identifier: Apache-2.0
"""Depth routing for TPU: the read of a site and the gradient of a source, one pass each."""

from atomic_kernels.depth_routing.tpu import read_sources, row_products, source_gradients

__all__ = ["read_sources", "row_products", "source_gradients"]
