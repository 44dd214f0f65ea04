# SPDX-License-Identifier: Apache-2.0
"""Protects LayerNorm and RMSNorm through the TPU kernels, run here in interpret mode.

Oracle: the formula in float64 with automatic differentiation. float32 differs from it by sums over
the channels and 300 rows in another order, 1e-5 relative RMS; bfloat16 by one rounding of y and dx,
4e-3. A mean a hundred times the spread is where a one-pass variance would have nothing left.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.norms import normalise

from atomic_lib.model import layers
from atomic_lib.model.mixers.gdn2 import HeadNorm

ROWS, SIZE = 300, 256  # no tile divides the rows
EPSILON = 1e-6
LIMITS = {"float32": 1e-5, "bfloat16": 4e-3}


def exact(x, scale, bias, group, centred):
    x = x.reshape(ROWS, -1, group)
    if centred:
        x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x.reshape(ROWS, SIZE) * scale + bias


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("group", "centred", "mean"), [(256, True, 100.0), (128, False, 0.5)])
def test_norms_and_their_gradients_match_float64(group, centred, mean, dtype):
    rng = np.random.default_rng(0)
    # Rows of very different size; one is constant, where only epsilon is left.
    x = (mean + rng.normal(size=(ROWS, SIZE))) * np.exp(rng.normal(size=(ROWS, 1)))
    x[7] = 1.0
    arrays = [jnp.asarray(x, dtype), *jnp.asarray(rng.normal(size=(2, SIZE)), jnp.float32)]
    d_y = jnp.asarray(rng.normal(size=(ROWS, SIZE)), dtype)
    y, pull = jax.vjp(lambda *a: normalise(*a, group, centred, EPSILON, True), *arrays)
    found = (y, *pull(d_y))
    with jax.enable_x64(True):
        exact_arrays = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays]
        want_y, pull = jax.vjp(lambda *a: exact(*a, group, centred), *exact_arrays)
        wanted = (want_y, *pull(jnp.asarray(np.asarray(d_y, np.float64))))
    for name, got, want, like in zip(
        ("y", "dx", "dscale", "dbias"), found, wanted, (y, *arrays), strict=True
    ):
        assert (got.shape, got.dtype) == (like.shape, like.dtype), name
        got, want = np.asarray(got, np.float64), np.asarray(want)
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert error <= LIMITS[dtype], f"{name}: relative RMS {error:.2e}"


@pytest.mark.parametrize(
    ("kind", "size", "shape"),
    [(layers.LayerNorm, 256, (2, 9, 256)), (layers.RMSNorm, 256, (2, 9, 256)),
     (HeadNorm, 256, (2, 9, 2, 128))],
)  # fmt: skip
def test_a_models_norms_are_the_same_function_either_way(kind, size, shape, monkeypatch):
    monkeypatch.setattr(layers, "normalise", lambda *arguments: normalise(*arguments, True))
    rng = np.random.default_rng(1)
    x = jnp.asarray(3.0 + rng.normal(size=shape), jnp.float32)
    results = []
    for implementation in ("xla", "tpu"):
        module = kind(size, epsilon=EPSILON, implementation=implementation)
        module.scale[...] = jnp.linspace(0.5, 2.0, size)
        if kind is layers.LayerNorm:
            module.bias[...] = jnp.linspace(-1.0, 1.0, size)
        results.append(module(x))
    assert results[1].shape == shape
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_a_group_that_is_no_number_of_lanes_is_refused():
    x, vector = jnp.zeros((8, 192)), jnp.zeros(192)
    with pytest.raises(ValueError, match=r"group one of 128; got x \(8, 192\)"):
        normalise(x, vector, vector, 192, True, EPSILON)
