# SPDX-License-Identifier: Apache-2.0
"""Protects the XLA backend's products of pairs and its inverse, on decays and keys that are hard.

Oracles: sums over pairs of tokens in float64 with numpy, and numpy's inverse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2.arithmetic import PRECISION_PARTS, Rounding
from atomic_kernels.gdn2.levels import block_totals
from atomic_kernels.gdn2.pairs import WIDTH, invert_unit_lower, level_operands, pair_scores
from gdn2_cases import assert_close, log_decays

SIZE = 16
# Relative, at mean cosine 0.9: 24 and 24 bits of the fine operands, 16 of bf16's, times the growth
# of the ladder.
INVERSE_LIMITS = {"f32": 5e-6, "bf16x3": 5e-6, "bf16": 2e-4}


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind", ["mild", "spikes", "zero"])
def test_scores_are_sums_over_pairs_with_the_decay_between(kind, chunk):
    random = np.random.default_rng(0)
    g = log_decays(kind, chunk, SIZE)
    q, k, erase = random.standard_normal((3, chunk, SIZE)).astype(np.float32)
    decay = jnp.exp(jnp.asarray(g, jnp.float32))

    @jax.jit
    def scores(q, k, erase, decay):
        totals = block_totals(decay, WIDTH)
        levels, *factors = level_operands(q * decay, erase * decay, k, totals, Rounding(parts=0))
        return pair_scores(levels, 2), factors

    found, factors = scores(q, k, erase, decay)
    between = np.zeros((chunk, chunk, SIZE))
    for i in range(chunk):
        for j in range(i):
            between[i, j] = np.exp(np.sum(g[j + 1 : i + 1], 0))
    for name, got, x in (("Aqk", found[0], q), ("Akk", found[1], erase)):
        assert_close(name, got, np.einsum("id,jd,ijd->ij", x, k, between), limit=2e-6)
    prefix = np.exp(np.stack([np.sum(g[: t + 1], 0) for t in range(chunk)]))
    suffix = np.exp(np.stack([np.sum(g[t + 1 :], 0) for t in range(chunk)]))
    for name, got, want in zip(
        ("Qt", "Kb", "Kg"), factors, (q * prefix, erase * prefix, k * suffix), strict=True
    ):
        assert_close(name, got, want, limit=2e-6)


@pytest.mark.parametrize("precision", INVERSE_LIMITS)
@pytest.mark.parametrize("mean_cosine", [0.0, 0.5, 0.9, 1.0])
def test_the_inverse_is_exact_for_correlated_keys(mean_cosine, precision):
    random = np.random.default_rng(0)
    size = 128
    k = mean_cosine**0.5 * random.standard_normal((1, size))
    k = k + (1 - mean_cosine) ** 0.5 * random.standard_normal((size, size))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    erase = 2 * random.uniform(size=(size, size))
    lower = np.tril((erase * k) @ k.T, -1).astype(np.float32)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    rounding = Rounding(parts=PRECISION_PARTS[precision])
    got = invert_unit_lower(jnp.asarray(lower), rounding)
    assert_close("A", got, want, limit=INVERSE_LIMITS[precision])
