# SPDX-License-Identifier: Apache-2.0
"""Protects depth routing through the TPU kernels, run here in interpret mode.

Oracle: the formula of `routing.py` in numpy-like float64 with automatic differentiation, sharing
nothing with the kernels nor with the slots that carry gradients back. float32 differs from it by
sums over 128 channels and 140 tokens in another order: 1e-5 relative RMS (measured 1e-6). bfloat16
rounds r and dv once (2^-9 = 2e-3 at most, 1.1e-3 RMS) and the score gradients to bfloat16 before
their products: 1e-2 (measured 6e-3, with queries of unit scale). Interpret mode does not round
float32 operands of a matrix product, so it says nothing about a TPU's products.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.depth_routing import read_sources, row_products, source_gradients

from atomic_lib.model.depth import Source, plan_depth
from atomic_lib.model.routing_tpu import TpuDepthLedger

EPSILON = 1e-6
BATCH, TOKENS, SIZE = 2, 70, 128  # 140 tokens: neither tile divides them
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}


def exact_read(weight, values):
    scores = jnp.stack(
        [(v @ weight) * jax.lax.rsqrt(jnp.mean(v * v, -1) + EPSILON) for v in values]
    )
    shares = jax.nn.softmax(scores, 0)
    return sum(share[..., None] * value for share, value in zip(shares, values, strict=True))


def relative_rms(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))


def assert_close(name, found, wanted, *, shape, dtype):
    assert (found.shape, found.dtype) == (shape, jnp.dtype(dtype)), name
    assert np.isfinite(np.asarray(found, np.float64)).all(), name
    error, limit = relative_rms(found, wanted), LIMITS[jnp.dtype(dtype).name]
    assert error <= limit, f"{name}: relative RMS {error:.2e}, allowed {limit:g}"


def case(routing, dtype):
    """A plan of two blocks of two sublayers; sources, sites' weights and cotangents by name."""
    plan = plan_depth(routing, num_blocks=2, slots=2)
    sources = [Source(b, s) for b in range(2) for s in range(2)] + [Source(0)]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    # Names as strings: Source(0) and Source(0, 0) have no order, and jax sorts dictionaries.
    values = {str(s): draw(BATCH, TOKENS, SIZE).astype(dtype) for s in sources if plan.consumers(s)}
    sites = [(b, s) for b in range(2) for s in range(2) if plan.reads[b][s]]
    weights = {site: draw(SIZE).astype(jnp.float32) for site in sites}
    cotangents = {site: draw(BATCH, TOKENS, SIZE).astype(dtype) for site in sites}
    return plan, sources, values, weights, cotangents


def used_otherwise(values):
    """A source's ways around the routing, as the residual stream and its block's summary are."""
    return sum(
        jnp.sum(x * jnp.roll(x, 1 + way, -1).astype(jnp.float32))
        for uses in values.values()
        for way, x in enumerate(uses)
    )


@pytest.mark.parametrize(
    ("routing", "dtype", "other_uses"),
    [("hierarchical", "float32", 2), ("hierarchical", "float32", 0), ("flat", "bfloat16", 1)],
)
def test_reads_and_all_gradients_match_float64(routing, dtype, other_uses):
    plan, sources, values, weights, cotangents = case(routing, dtype)

    def through_kernels(values, weights):
        ledger = TpuDepthLedger(plan, weights, epsilon=EPSILON, interpret=True)
        kept = {
            str(source): ledger.add(source, values[str(source)], other_uses=other_uses)
            for source in sources
            if str(source) in values
        }
        reads = {site: ledger.read(site) for site in cotangents}
        total = sum(jnp.sum(jnp.float32(1) * reads[s] * c) for s, c in cotangents.items())
        return total + used_otherwise(kept), reads

    def through_formula(values, weights):
        reads = {
            (b, s): exact_read(weights[b, s], [values[str(source)] for source in plan.reads[b][s]])
            for b, s in cotangents
        }
        total = sum(jnp.sum(reads[site] * c) for site, c in cotangents.items())
        uses = {name: (value,) * other_uses for name, value in values.items()}
        return total + used_otherwise(uses), reads

    gradients, reads = jax.jit(jax.grad(through_kernels, (0, 1), has_aux=True))(values, weights)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (values, weights))
        wanted, wanted_reads = jax.jit(jax.grad(through_formula, (0, 1), has_aux=True))(*wide)
    whole = (BATCH, TOKENS, SIZE)
    for site, read in reads.items():
        assert_close(f"read {site}", read, wanted_reads[site], shape=whole, dtype=dtype)
    for source, gradient in gradients[0].items():
        assert_close(f"d {source}", gradient, wanted[0][source], shape=whole, dtype=dtype)
    for site, gradient in gradients[1].items():
        assert gradient.dtype == jnp.float32
        if len(plan.reads[site[0]][site[1]]) == 1:
            # One source has share 1 whatever the weight: the exact gradient is 0.
            part = np.sqrt(np.mean(np.square(gradient)) / (SIZE * BATCH * TOKENS))
            assert part <= LIMITS[dtype], f"d weight {site}: {part:.2e} of one term's size"
            continue
        error = relative_rms(gradient, wanted[1][site])
        assert error <= LIMITS[dtype], f"d weight {site}: relative RMS {error:.2e}"


def test_a_zero_query_reads_the_mean_of_its_sources():
    _, _, values, _, _ = case("flat", "float32")
    rows = [value.reshape(-1, SIZE) for value in values.values()]
    read, shares = read_sources(jnp.zeros(SIZE), rows, epsilon=EPSILON, interpret=True)
    np.testing.assert_allclose(shares, 1 / len(rows), rtol=1e-6)
    np.testing.assert_allclose(read, sum(rows) / len(rows), rtol=1e-5, atol=1e-6)


def test_zero_sources_and_padding_stay_finite():
    rows = [jnp.zeros((3, SIZE))] * 2
    read, shares = read_sources(jnp.ones(SIZE), rows, epsilon=EPSILON, interpret=True)
    assert not np.any(np.asarray(read))
    d_value, d_weights = source_gradients(
        rows[0], [rows[0]], jnp.ones((1, SIZE)), shares[:1], jnp.zeros((1, 3)),
        [jnp.ones((3, SIZE))], epsilon=EPSILON, interpret=True,
    )  # fmt: skip
    np.testing.assert_allclose(d_value, 0.5, rtol=1e-6)
    assert np.isfinite(np.asarray(d_weights)).all()


def test_row_products_are_those_of_float64():
    a, b = np.random.default_rng(4).normal(size=(2, 300, SIZE)).astype(np.float32)
    found = row_products(jnp.asarray(a), jnp.asarray(b), interpret=True)
    wanted = np.sum(a.astype(np.float64) * b, axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arrays", "size", "words"),
    [
        ([jnp.zeros((8, 64))], 64, "multiple of 128"),
        ([jnp.zeros((8, 128)), jnp.zeros((9, 128))], 128, "must be alike"),
        ([jnp.zeros((8, 128)), jnp.zeros((8, 128), jnp.bfloat16)], 128, "must be alike"),
        ([jnp.zeros((8, 128))] * 129, 128, "takes 1 to 128"),
    ],
    ids=["width-64", "other-length", "other-dtype", "too-many"],
)
def test_arrays_that_the_kernel_cannot_take_are_refused(arrays, size, words):
    with pytest.raises(ValueError, match=words):
        read_sources(jnp.zeros(size), arrays, epsilon=EPSILON, interpret=True)
