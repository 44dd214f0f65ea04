# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoFormer, arXiv 2104.09864)."""

import jax
import jax.numpy as jnp

Array = jax.Array


def rotate(x: Array, positions: Array, *, theta: float) -> Array:
    """Turns channel pairs by an angle proportional to the position.

    x [B, T, H, P] with even P; positions [B, T] int32. Channels i and i + P/2 form a pair, turned
    by position * theta^(-2i/P) radians; the angle is float32. Returns x's shape and dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # [B, T, 1, P/2] radians
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
