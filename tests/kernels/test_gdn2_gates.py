# SPDX-License-Identifier: Apache-2.0
"""Protects the decay gate and the raw-projection entry.

Oracles: the formulas composed in float64 with JAX's own softplus and sigmoid and the
token-by-token recurrence. Limits: 2e-5 in float32, and 2e-6 where only elementwise functions are
involved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2 import decay_gate, gdn2_from_projections
from atomic_kernels.gdn2.gates import LARGEST_EXPONENT
from gdn2_cases import assert_close, small_inputs

HEADS, SIZE = 2, 16
NAMES = ("q", "k", "v", "g", "b", "w", "initial_state", "A_log", "dt_bias")


def gate_in_float64(x, a_log, dt_bias, lower_bound):
    z = x + dt_bias
    rate = jnp.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(rate * z)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_decay_gate_and_its_gradients(lower_bound):
    random = np.random.default_rng(0)
    x = 10 * random.standard_normal((3, HEADS, SIZE))
    a_log, dt_bias = random.standard_normal(HEADS), random.standard_normal((HEADS, SIZE))
    arrays = [a.astype(np.float32) for a in (x, a_log, dt_bias)]
    cotangent = random.standard_normal(x.shape).astype(np.float32)
    g, pull = jax.vjp(lambda *a: decay_gate(*a, lower_bound=lower_bound), *arrays)
    gradients = pull(jnp.asarray(cotangent))
    with jax.enable_x64(True):
        arrays64 = [jnp.asarray(a, jnp.float64) for a in arrays]
        want, pull = jax.vjp(lambda *a: gate_in_float64(*a, lower_bound), *arrays64)
        want_gradients = pull(jnp.asarray(cotangent, jnp.float64))
    assert g.dtype == jnp.float32
    assert_close("g", g, want, limit=2e-6)
    for name, got, expected in zip(("dx", "dA_log", "ddt_bias"), gradients, want_gradients,
                                   strict=True):  # fmt: skip
        assert_close(name, got, expected, limit=2e-6)


@pytest.mark.parametrize("a_log", [-200.0, 0.0, 80.0, 90.0, 200.0, 1e4])
@pytest.mark.parametrize("x", [-1e4, -200.0, -90.0, 0.0, 90.0, 1e4])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gate_is_finite_for_huge_rates_and_saturated_inputs(a_log, x, lower_bound):
    def gate(x, a_log):
        return decay_gate(x, a_log, None, lower_bound=lower_bound).sum()

    arrays = (jnp.full((1, 1, 1), x, jnp.float32), jnp.full((1,), a_log, jnp.float32))
    g, gradients = jax.value_and_grad(gate, argnums=(0, 1))(*arrays)
    assert np.isfinite(g)
    assert g <= 0
    assert all(np.isfinite(d).all() for d in gradients)
    if lower_bound is None:
        softplus = max(x, 0) + np.log1p(np.exp(-abs(x)))
        log_g = a_log + (np.log(softplus) if softplus > 0 else x)
        want = -np.exp(min(log_g, LARGEST_EXPONENT))
        np.testing.assert_allclose(g, want, rtol=2e-5, atol=np.finfo(np.float32).tiny)


def test_a_nan_passes_through_the_gate():
    assert np.isnan(decay_gate(jnp.full((1, 1, 1), jnp.nan), jnp.zeros(1), None)).all()


def raw_inputs(length):
    arrays = small_inputs(length=length, batch=2, heads=HEADS, value_heads=4, key_size=SIZE)
    random = np.random.default_rng(5)
    for name in ("q", "k", "g", "b", "w"):
        arrays[name] = 2 * random.standard_normal(arrays[name].shape).astype(np.float32)
    arrays["A_log"] = random.standard_normal(HEADS).astype(np.float32)
    arrays["dt_bias"] = 1 + random.standard_normal((HEADS, SIZE)).astype(np.float32)
    return arrays


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"negative_eigenvalues": True, "lower_bound": -5.0},
        {"qk_l2norm": False, "without": ("A_log", "dt_bias")},
        {"without": ("A_log",)},
    ],
    ids=str,
)
def test_projections_equal_the_composed_parts(options):
    options = dict(options)
    without = options.pop("without", ())
    length = 40  # no multiple of the chunk: the padding must not decay or write
    arrays = raw_inputs(length)
    if not options.get("qk_l2norm", True):
        arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    names = [n for n in NAMES if n not in without]
    random = np.random.default_rng(7)
    d_o = random.standard_normal(arrays["v"].shape).astype(np.float32)
    d_state = random.standard_normal(arrays["initial_state"].shape).astype(np.float32)

    def fused(*values):
        named = dict(zip(names, values, strict=True))
        inputs = [named.pop(n) for n in NAMES[:6]]
        return gdn2_from_projections(*inputs, **named, backend="xla", chunk_size=32, **options)

    def composed(*values):
        named = dict(zip(names, values, strict=True))
        q, k, v, g, b, w = (named[n] for n in NAMES[:6])
        a_log = named.get("A_log", jnp.zeros(HEADS))
        dt_bias = named.get("dt_bias", jnp.zeros((HEADS, SIZE)))
        if options.get("qk_l2norm", True):
            q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        g = gate_in_float64(g, a_log, dt_bias, options.get("lower_bound"))
        b = jax.nn.sigmoid(b) * (2 if options.get("negative_eigenvalues") else 1)
        w, state = jax.nn.sigmoid(w), named["initial_state"]
        q, k, g, b = (jnp.repeat(x, 2, axis=2) for x in (q, k, g, b))

        def token(state, inputs):
            q, k, g, b, v, w = inputs
            state = jnp.exp(g)[..., None] * state
            read = jnp.einsum("bhk,bhkv->bhv", b * k, state)
            state = state + jnp.einsum("bhk,bhv->bhkv", k, w * v - read)
            return state, SIZE**-0.5 * jnp.einsum("bhk,bhkv->bhv", q, state)

        by_token = [x.swapaxes(0, 1) for x in (q, k, g, b, v, w)]
        state, o = jax.lax.scan(token, state, by_token)
        return o.swapaxes(0, 1), state

    def with_gradients(function, d_o, d_state, *values):
        results, pull = jax.vjp(function, *values)
        return *results, *pull((d_o, d_state))

    run = jax.jit(with_gradients, static_argnums=0)
    values = [arrays[n] for n in names]
    got = run(fused, d_o, d_state, *values)
    with jax.enable_x64(True):
        to64 = lambda x: jnp.asarray(np.asarray(x, np.float64))  # noqa: E731
        want = run(composed, to64(d_o), to64(d_state), *map(to64, values))
    for name, x, y in zip(("o", "state", *names), got, want, strict=True):
        assert_close(name, x, y, limit=2e-5)


def test_projection_gradients_have_their_argument_dtypes():
    arrays = raw_inputs(8)
    values = [jnp.asarray(arrays[n], jnp.bfloat16) for n in NAMES]
    values[6] = values[6].astype(jnp.float32)

    def loss(*values):
        o, _ = gdn2_from_projections(
            *values[:6], initial_state=values[6], A_log=values[7], dt_bias=values[8]
        )
        return o.astype(jnp.float32).sum()

    gradients = jax.eval_shape(jax.grad(loss, argnums=tuple(range(9))), *values)
    for name, value, gradient in zip(NAMES, values, gradients, strict=True):
        assert gradient.dtype == value.dtype, name
        assert gradient.shape == value.shape, name
