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
from atomic_kernels.norms import add_and_normalise, normalise

from atomic_lib.model import layers
from atomic_lib.model.mixers import gdn2

ROWS, SIZE = 300, 256  # no tile divides the rows
EPSILON = 1e-6
LIMITS = {"float32": 1e-5, "bfloat16": 4e-3}


def exact(x, scale, bias, group, centred):
    x = x.reshape(ROWS, -1, group)
    if centred:
        x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x.reshape(ROWS, SIZE) * scale + bias


def hard_rows(rng, mean=0.0):
    """Rows of very different size; one is constant, where only epsilon is left."""
    x = (mean + rng.normal(size=(ROWS, SIZE))) * np.exp(rng.normal(size=(ROWS, 1)))
    x[7] = 1.0
    return x


def assert_close(names, found, wanted, likes, limit):
    for name, got, want, like in zip(names, found, wanted, likes, strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype), name
        got, want = np.asarray(got, np.float64), np.asarray(want)
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert error <= limit, f"{name}: relative RMS {error:.2e}"


def with_gradients(function, arrays, cotangents):
    outputs, pull = jax.vjp(function, *arrays)
    return (*outputs, *pull(cotangents))


def in_float64(function, arrays, cotangents):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays, cotangents))
        return with_gradients(function, *wide)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("group", "centred", "mean"), [(256, True, 100.0), (128, False, 0.5)])
def test_norms_and_their_gradients_match_float64(group, centred, mean, dtype):
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(hard_rows(rng, mean), dtype),
        *jnp.asarray(rng.normal(size=(2, SIZE)), jnp.float32),
    ]
    d_y = (jnp.asarray(rng.normal(size=(ROWS, SIZE)), dtype),)
    norm = lambda *a: (normalise(*a, group, centred, EPSILON, True),)  # noqa: E731
    found = with_gradients(norm, arrays, d_y)
    wanted = in_float64(lambda *a: (exact(*a, group, centred),), arrays, d_y)
    names = ("y", "dx", "dscale", "dbias")
    assert_close(names, found, wanted, (*d_y, *arrays), LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("reads", [False, True])
def test_a_sum_its_norm_and_their_gradients_match_float64(reads, dtype):
    rng = np.random.default_rng(2)
    terms = [jnp.asarray(hard_rows(rng), dtype) for _ in range(3 if reads else 2)]
    arrays = [*terms, *jnp.asarray(rng.normal(size=(2, SIZE)), jnp.float32)]
    gradients = tuple(jnp.asarray(g, dtype) for g in rng.normal(size=(2, ROWS, SIZE)))

    def split(arrays):
        *terms, scale, bias = arrays
        return (*terms, None)[:3], scale, bias

    def kernels(*arrays):
        terms, *vectors = split(arrays)
        return add_and_normalise(*terms, *vectors, SIZE, True, EPSILON, True)

    def formula(*arrays):
        (x, delta, read), *vectors = split(arrays)
        stream = x + delta
        if dtype == "bfloat16":  # stored as it is rounded; what follows starts from that
            stream = stream + jax.lax.stop_gradient(
                stream.astype(jnp.bfloat16).astype(stream.dtype) - stream
            )
        return stream, exact(stream if read is None else stream + read, *vectors, SIZE, True)

    found = with_gradients(kernels, arrays, gradients)
    wanted = in_float64(formula, arrays, gradients)
    names = ("stream", "y", "dx", "ddelta", *["dread"] * reads, "dscale", "dbias")
    assert_close(names, found, wanted, (*gradients, *arrays), LIMITS[dtype])


def interpreted(monkeypatch):
    for module in (layers, gdn2):
        monkeypatch.setattr(module, "normalise", lambda *arguments: normalise(*arguments, True))
    monkeypatch.setattr(layers, "add_and_normalise", lambda *a: add_and_normalise(*a, True))


def lively(kind, implementation):
    module = kind(SIZE, epsilon=EPSILON, implementation=implementation)
    module.scale[...] = jnp.linspace(0.5, 2.0, SIZE)
    if kind is layers.LayerNorm:
        module.bias[...] = jnp.linspace(-1.0, 1.0, SIZE)
    return module


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(layers.LayerNorm, (2, 9, 256)), (layers.RMSNorm, (2, 9, 256)),
     (gdn2.HeadNorm, (2, 9, 2, 128))],
)  # fmt: skip
def test_a_models_norms_are_the_same_function_either_way(kind, shape, monkeypatch):
    interpreted(monkeypatch)
    rng = np.random.default_rng(1)
    x = jnp.asarray(3.0 + rng.normal(size=shape), jnp.float32)
    on_tpu, by_xla = (lively(kind, implementation)(x) for implementation in ("tpu", "xla"))
    assert on_tpu.shape == shape
    np.testing.assert_allclose(on_tpu, by_xla, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [layers.LayerNorm, layers.RMSNorm])
@pytest.mark.parametrize("reads", [False, True])
def test_sums_before_a_models_norms_are_the_same_either_way(kind, reads, monkeypatch):
    interpreted(monkeypatch)
    rng = np.random.default_rng(3)
    x, delta, read = jnp.asarray(rng.normal(size=(3, 2, 9, 256)), jnp.float32)
    on_tpu, by_xla = (
        lively(kind, implementation).after_sum(x, delta, read if reads else None)
        for implementation in ("tpu", "xla")
    )
    for one, other in zip(on_tpu, by_xla, strict=True):
        assert one.shape == x.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_group_that_is_no_number_of_lanes_is_refused():
    x, vector = jnp.zeros((8, 192)), jnp.zeros(192)
    with pytest.raises(ValueError, match=r"group one of 128; got x \(8, 192\)"):
        normalise(x, vector, vector, 192, True, EPSILON)
