# SPDX-License-Identifier: Apache-2.0
"""Dense layers and norms. Parameters are float32; results have the compute dtype.

Modules are made with zeros and ones; `initialise.py` says what a model starts as.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from atomic_kernels.norms import add_and_normalise, normalise
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


class Norm(nnx.Module):
    """What RMSNorm and LayerNorm have in common; `implementation` as in `Execution.norms`."""

    centred: bool  # takes the mean away

    def __init__(self, size: int, *, epsilon: float, implementation: str = "xla"):
        self.epsilon, self.implementation = epsilon, implementation
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        if self.centred:
            self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """x [..., size] -> the same shape and dtype; float32 inside."""
        if self.implementation == "tpu":
            return self._kernel(normalise, x)
        scale = self.scale[...]
        if not self.centred:
            return (rms_normalise(x, self.epsilon) * scale).astype(x.dtype)
        wide = x.astype(jnp.float32)
        # Two passes: the mean of squares minus the squared mean cancels when the mean is large.
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        return (rms_normalise(centred, self.epsilon) * scale + self.bias[...]).astype(x.dtype)

    def after_sum(self, x: Array, delta: Array, read: Array | None) -> tuple[Array, Array]:
        """(x + delta, norm of x + delta + read); all [..., size] of one dtype, read may be None."""
        if self.implementation == "tpu":
            return self._kernel(add_and_normalise, x, delta, read)
        stream = x + delta
        return stream, self(stream if read is None else stream + read)

    def _kernel(self, function: Callable, x: Array, *others: Array | None) -> Any:
        """`function` of atomic_kernels.norms, of [..., size] each; no bias is a bias of zeros."""
        scale = self.scale[...]
        bias = self.bias[...] if self.centred else jnp.zeros_like(scale)
        rows = (y if y is None else y.reshape(-1, x.shape[-1]) for y in (x, *others))
        results = function(*rows, scale, bias, scale.size, self.centred, self.epsilon)
        return jax.tree.map(lambda y: y.reshape(x.shape), results)


class RMSNorm(Norm):
    """scale * x / sqrt(mean(x^2) + epsilon) over the last axis; size parameters."""

    centred = False


class LayerNorm(Norm):
    """scale * (x - mean) / sqrt(variance + epsilon) + bias, last axis; 2 size parameters."""

    centred = True


def norm(config: ModelConfig, execution: Execution) -> Norm:
    """Returns the norm of the configuration's family over the hidden size."""
    kind = LayerNorm if config.norm_family == "L" else RMSNorm
    return kind(config.hidden_size, epsilon=config.norm_epsilon, implementation=execution.norms)
