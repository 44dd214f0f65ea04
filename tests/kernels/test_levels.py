# SPDX-License-Identifier: Apache-2.0
"""Protects the level scheme: the decay between every pair of tokens, and what each decay gets.

Oracles: numpy formulas over pairs of tokens, in float64; they share no code and no order of
operations with the levels. `width` 1 is a chunk in order, as the XLA backend has it; with 8 the
levels reach over runs of C / 8 tokens, as in the TPU kernels. Float32 tolerances: products of at
most 7 factors and sums of at most 128 terms, each rounded by 6e-8.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2 import levels
from gdn2_cases import assert_close, by_steps, in_order, log_decays

CHUNK = 128
FACTOR_LIMIT = 2e-6
SUM_LIMIT = 2e-6

widths = pytest.mark.parametrize("width", [1, 8])


def level_count(width):
    return (CHUNK // width).bit_length() - 1


@widths
@pytest.mark.parametrize("kind", ["mild", "spikes", "zero"])
def test_rows_and_keys_carry_their_decay_through_the_levels(kind, width):
    """Rows of ones: every level's factors, and at last the products over the whole run."""
    g = log_decays(kind, CHUNK, 16)
    decay = jnp.asarray(by_steps(np.exp(g), width), jnp.float32)
    totals = levels.block_totals(decay, width)
    rows, keys = decay, jnp.ones_like(decay)
    t = np.arange(CHUNK)
    for level in range(level_count(width) + 1):
        start, end = t & ~((1 << level) - 1), t | ((1 << level) - 1)
        # Sums over their own tokens alone: differences of running sums cancel beside a spike.
        before = np.stack([g[a : b + 1].sum(0) for a, b in zip(start, t, strict=True)])
        after = np.stack([g[a + 1 : b + 1].sum(0) for a, b in zip(t, end, strict=True)])
        for found, wanted in ((rows, before), (keys, after)):
            found = in_order(np.asarray(found), width)
            np.testing.assert_allclose(found, np.exp(wanted), rtol=FACTOR_LIMIT, atol=1e-30)
        if level < level_count(width):
            rows = levels.climb_rows(rows, totals, level, width)
            keys = levels.climb_keys(keys, totals, level, width)


@widths
def test_masks_cover_every_pair_of_a_run_once(width):
    run = CHUNK // width
    count = np.zeros((CHUNK, CHUNK), int)
    tokens = jnp.asarray(by_steps(np.arange(CHUNK)[:, None], width))
    for level in range(level_count(width)):
        mask = levels.level_mask((CHUNK // 2, CHUNK), 1 << level, width, run)
        count[np.asarray(levels.upper(tokens, width << level))[:, 0]] += np.asarray(mask)
    block = np.arange(CHUNK) // run
    same_run = block[:, None] == block[None]
    np.testing.assert_array_equal(count, np.tril(same_run, -1).astype(int))


@widths
def test_a_level_undone_is_its_transpose(width):
    """Oracle: the gradients of a climb by automatic differentiation."""
    random = np.random.default_rng(1)
    shape = (CHUNK, 8)
    decay = jnp.asarray(random.uniform(0.5, 1.0, shape), jnp.float32)
    totals = levels.block_totals(decay, width)
    level = 1
    x, done = jnp.asarray(random.standard_normal((2, *shape)), jnp.float32)
    half_rows = jnp.zeros((CHUNK // 2, 8))
    found = levels.LevelGradient(*[half_rows] * 5)
    blocks = jnp.zeros((CHUNK // 2 ** (level + 1), 8))
    undone = levels.undo_level(
        levels.Undone(done, done, done, done, done, blocks), found, totals, level, width
    )
    for got, climb in ((undone.query, levels.climb_rows), (undone.key, levels.climb_keys)):
        (want,) = jax.vjp(lambda x, climb=climb: climb(x, totals, level, width), x)[1](done)
        assert_close(climb.__name__, got, want, limit=1e-7)


@widths
def test_decays_get_the_rows_and_keys_that_straddle_them(width):
    """Rows' sums fall on the decays from their run's start to them, keys' on those after them."""
    rows, keys = np.random.default_rng(1).standard_normal((2, CHUNK, 16)).astype(np.float32)

    @jax.jit
    def passed_down(rows, keys):
        to_all = jnp.zeros((width, rows.shape[1]))
        for level in reversed(range(level_count(width))):
            to_all = levels.pass_down(to_all, rows, keys, level, width)
        return to_all + rows

    found = in_order(np.asarray(passed_down(by_steps(rows, width), by_steps(keys, width))), width)
    runs = (width, CHUNK // width, rows.shape[1])
    wanted = np.flip(np.cumsum(np.flip(rows.reshape(runs).astype(float), 1), 1), 1)
    wanted[:, 1:] += np.cumsum(keys.reshape(runs).astype(float), 1)[:, :-1]
    assert_close("dg", found, wanted.reshape(rows.shape), limit=SUM_LIMIT)


@pytest.mark.parametrize("half", [1, 8, 16, 64])
def test_halves_interleave_back(half):
    x = jnp.arange(CHUNK * 4.0).reshape(CHUNK, 4)
    low, high = levels.lower(x, half), levels.upper(x, half)
    np.testing.assert_array_equal(levels.interleave(low, high, half), x)
    np.testing.assert_array_equal(levels.add_upper(x, -high, half)[half], 0)
    np.testing.assert_array_equal(levels.add_lower(x, -low, half)[0], 0)
    assert high[0, 0] == half * 4
