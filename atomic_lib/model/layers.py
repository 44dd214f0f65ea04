# SPDX-License-Identifier: Apache-2.0
"""Dense layers and norms. Parameters are float32; results have the compute dtype.

Modules are made with zeros and ones; `initialise.py` says what a model starts as.
"""

import jax
import jax.numpy as jnp
from atomic_kernels.norms import normalise
from flax import nnx

from atomic_lib.model.config import ModelConfig
from atomic_lib.model.execution import Execution

Array = jax.Array


class Dense(nnx.Module):
    """y = x kernel (+ bias); kernel [in, out]."""

    def __init__(
        self, in_size: int, out_size: int, execution: Execution, *, use_bias: bool = False
    ):
        self.compute_dtype = execution.compute_dtype
        self.kernel = nnx.Param(jnp.zeros((in_size, out_size), jnp.float32))
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((out_size,), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """x [..., in] -> [..., out] in the compute dtype."""
        y = x.astype(self.compute_dtype) @ self.kernel[...].astype(self.compute_dtype)
        return y + self.bias[...].astype(self.compute_dtype) if self.use_bias else y


def rms_normalise(x: Array, epsilon: float) -> Array:
    """Returns x / sqrt(mean(x^2) + epsilon) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def normalise_on_tpu(
    x: Array, scale: Array, bias: Array | None, *, group: int, centred: bool, epsilon: float
) -> Array:
    """`atomic_kernels.norms.normalise` of x [..., D]; no bias is a bias of zeros."""
    bias = jnp.zeros_like(scale) if bias is None else bias
    rows = x.reshape(-1, x.shape[-1])
    return normalise(rows, scale, bias, group, centred, epsilon).reshape(x.shape)


class RMSNorm(nnx.Module):
    """scale * x / sqrt(mean(x^2) + epsilon) over the last axis; size parameters."""

    def __init__(self, size: int, *, epsilon: float, implementation: str = "xla"):
        self.epsilon, self.implementation = epsilon, implementation
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """x [..., size] -> the same shape and dtype; float32 inside."""
        scale = self.scale[...]
        if self.implementation == "tpu":
            return normalise_on_tpu(
                x, scale, None, group=scale.size, centred=False, epsilon=self.epsilon
            )
        return (rms_normalise(x, self.epsilon) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """scale * (x - mean) / sqrt(variance + epsilon) + bias, last axis; 2 size parameters."""

    def __init__(self, size: int, *, epsilon: float, implementation: str = "xla"):
        self.epsilon, self.implementation = epsilon, implementation
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """x [..., size] -> the same shape and dtype; float32 inside."""
        scale, bias = self.scale[...], self.bias[...]
        if self.implementation == "tpu":
            return normalise_on_tpu(
                x, scale, bias, group=scale.size, centred=True, epsilon=self.epsilon
            )
        wide = x.astype(jnp.float32)
        # Two passes: the mean of squares minus the squared mean cancels when the mean is large.
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        return (rms_normalise(centred, self.epsilon) * scale + bias).astype(x.dtype)


def norm(config: ModelConfig, execution: Execution) -> RMSNorm | LayerNorm:
    """Returns the norm of the configuration's family over the hidden size."""
    kind = LayerNorm if config.norm_family == "L" else RMSNorm
    return kind(config.hidden_size, epsilon=config.norm_epsilon, implementation=execution.norms)
