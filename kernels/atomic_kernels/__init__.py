# SPDX-License-Identifier: Apache-2.0
"""Kernels for Gated DeltaNet-2, on jax alone: see `atomic_kernels.gdn2`."""
