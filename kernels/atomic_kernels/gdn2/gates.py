# SPDX-License-Identifier: Apache-2.0
"""From raw projections to the inputs of GDN-2.

    g = -exp(A_log) softplus(x + dt_bias)              unbounded below, or
    g = lower_bound sigmoid(exp(A_log) (x + dt_bias))  in (lower_bound, 0)

    q, k <- x / sqrt(sum x^2 + 1e-6)      b <- sigmoid(x), or 2 sigmoid(x)      w <- sigmoid(x)

All in float32 (float64 for the reference).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from atomic_kernels.gdn2.chunk import Inputs

# Under the square root of the L2 norm. A zero vector stays zero with a finite gradient.
NORM_EPSILON = 1e-6
# exp overflows float32 above 88.72. A decay of -5e+34 nats is as good as any beyond it, and leaves
# a factor 6000 for bounds, cotangents and sums; its product with a zero gradient is 0, not NaN.
LARGEST_EXPONENT = 80.0


def decay_gate(
    x: Array, A_log: Array | None, dt_bias: Array | None, *, lower_bound: float | None = None
) -> Array:
    """The log decay g in nats, float32 (float64 for float64 x), in x's shape.

    x [.., H, K] raw projection; A_log [H]; dt_bias [H, K]; None for either is zeros. Without
    lower_bound, g = -exp(A_log) softplus(x + dt_bias); with it, lower_bound * sigmoid(exp(A_log)
    * (x + dt_bias)). Gradients are finite for every finite argument, also where exp(A_log)
    overflows or the softplus underflows. Raises ValueError for lower_bound >= 0.
    """
    if lower_bound is not None and not -float("inf") < lower_bound < 0:
        raise ValueError(
            f"lower_bound must be a finite log decay < 0 in nats, got {lower_bound!r}."
        )
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    z = x.astype(dtype)
    if dt_bias is not None:
        z = z + dt_bias.astype(dtype)
    if A_log is None:
        return decay_of_rate(z, None, lower_bound)
    z, log_rate = jnp.broadcast_arrays(z, A_log.astype(dtype)[..., None])
    return decay_of_rate(z, log_rate, lower_bound)


def decay_of_rate(z: Array, log_rate: Array | None, lower_bound: float | None) -> Array:
    """-exp(log_rate) softplus(z), or lower_bound sigmoid(exp(log_rate) z); shapes are equal.

    log_rate None stands for 0, without the exponential.
    """
    if lower_bound is None:
        return -_softplus(z) if log_rate is None else _unbounded_decay(z, log_rate)
    gate = jax.nn.sigmoid(z) if log_rate is None else _scaled_sigmoid(z, log_rate)
    return lower_bound * gate


@jax.custom_jvp
def _softplus(z: Array) -> Array:
    return jax.nn.softplus(z)


_softplus.defjvps(lambda d_z, decay, z: d_z * jax.nn.sigmoid(z))


@jax.custom_jvp
def _unbounded_decay(z: Array, log_rate: Array) -> Array:
    """-exp(log_rate) softplus(z), where exp(90) softplus(-90) is 1, not inf * 0."""
    return -_times_rate(jax.nn.softplus, z, log_rate)


@_unbounded_decay.defjvp
def _unbounded_decay_jvp(primals, tangents):
    z, log_rate = primals
    d_z, d_log_rate = tangents
    decay = _unbounded_decay(z, log_rate)
    return decay, -_times_rate(jax.nn.sigmoid, z, log_rate) * d_z + decay * d_log_rate


def _times_rate(function: Callable[[Array], Array], z: Array, log_rate: Array) -> Array:
    """exp(log_rate) function(z), at most exp(LARGEST_EXPONENT), for softplus and sigmoid.

    Both are exp(z) to float32 below -20. With f = exp(20) function(max(z, -20)) >= 1 the result is
    exp(log_rate + min(z, -20)) f, whose exponential may be cut off above the bound.
    """
    scaled = math.exp(20.0) * function(jnp.maximum(z, -20.0))
    rate = jnp.exp(jnp.minimum(log_rate + jnp.minimum(z, -20.0), LARGEST_EXPONENT + 5.0))
    return jnp.minimum(rate * scaled, math.exp(LARGEST_EXPONENT))


@jax.custom_jvp
def _scaled_sigmoid(z: Array, log_rate: Array) -> Array:
    """sigmoid(exp(log_rate) z)."""
    return jax.nn.sigmoid(_bounded_exp(log_rate) * z)


@_scaled_sigmoid.defjvp
def _scaled_sigmoid_jvp(primals, tangents):
    z, log_rate = primals
    d_z, d_log_rate = tangents
    rate = _bounded_exp(log_rate)
    log_slope = jax.nn.log_sigmoid(rate * z) + jax.nn.log_sigmoid(-rate * z)
    # exp(log_rate) sigmoid'(.) as one exponential: rate alone may be 3e+38 where sigmoid' is 0.
    slope = _bounded_exp(log_rate + log_slope)
    return jax.nn.sigmoid(rate * z), slope * d_z + slope * z * d_log_rate


def _bounded_exp(x: Array) -> Array:
    return jnp.exp(jnp.minimum(x, LARGEST_EXPONENT))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
    """How raw projections become the inputs of GDN-2."""

    qk_l2norm: bool = True
    negative_eigenvalues: bool = False
    lower_bound: float | None = None

    def activate(self, raw: Inputs, A_log: Array | None, dt_bias: Array | None) -> Inputs:
        """Normalised q, k, decay g and gates b, w in float32 (float64 stays float64).

        q, k, g, b [.., H, K]; v, w [.., H, V]; A_log [H]; dt_bias [H, K].
        """
        q, k, v, g, b, w = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in raw)
        if self.qk_l2norm:
            q, k = l2_normalise(q), l2_normalise(k)
        b = jax.nn.sigmoid(b) * (2.0 if self.negative_eigenvalues else 1.0)
        g = decay_gate(g, A_log, dt_bias, lower_bound=self.lower_bound)
        return Inputs(q, k, v, g, b, jax.nn.sigmoid(w))


def l2_normalise(x: Array) -> Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPSILON)
