# SPDX-License-Identifier: Apache-2.0
"""The short causal depthwise convolution with SiLU, and the tail that continues it.

    y_t = silu(sum_j kernel[taps-1-j] * x_{t-j}),   j = 0 .. taps-1

x is 0 before the row's first token, and where t - j lies before the token's segment.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.context import TokenContext

Array = jax.Array


def short_convolution(
    x: Array, kernel: Array, tail: Array | None, context: TokenContext
) -> tuple[Array, Array]:
    """Returns (silu of the convolution, the tail that continues it).

    x [B, T, C]; kernel [taps, C], its last row weighs the current token; tail [B, taps-1, C], the
    inputs before this call, or None for zeros. The output and the new tail have x's dtype; the sum
    is float32. Padding enters neither.
    """
    batch, length, channels = x.shape
    taps = kernel.shape[0]
    if tail is None:
        tail = jnp.zeros((batch, taps - 1, channels), x.dtype)
    # [B, taps-1+T, C]; index taps-1+t holds token t.
    row = jnp.concatenate([tail, x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(taps):
        begin = taps - 1 - back
        term = row[:, begin : begin + length].astype(jnp.float32) * kernel[begin]
        if back and context.first_visible is not None:
            visible = context.positions - back >= context.first_visible
            term = jnp.where(visible[:, :, None], term, 0.0)
        total = total + term
    if context.lengths is None:
        new_tail = row[:, length:]
    else:
        latest = context.lengths[:, None] + jnp.arange(taps - 1)[None]
        new_tail = jnp.take_along_axis(row, latest[:, :, None], axis=1)
    return jax.nn.silu(total).astype(x.dtype), new_tail


class ShortConvolution(nnx.Module):
    """`short_convolution` with its kernel; taps C parameters, no bias."""

    def __init__(self, taps: int, channels: int):
        self.kernel = nnx.Param(jnp.zeros((taps, channels), jnp.float32))

    def __call__(self, x: Array, tail: Array | None, context: TokenContext) -> tuple[Array, Array]:
        """x [B, T, C], tail [B, taps-1, C] or None -> (output, new tail)."""
        return short_convolution(x, self.kernel[...], tail, context)
