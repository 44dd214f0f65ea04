# SPDX-License-Identifier: Apache-2.0
"""The pure functions of the TPU kernels, one chunk at a time, against float64 arithmetic.

Protected: the level scheme (decays between every pair of tokens, local and never from differences
of long sums), the inverse of the leaves on keys that point the same way, and the reverse sums.
The oracles are numpy formulas over pairs of tokens and numpy's inverse: they share no code and no
order of operations with the kernels. Float32 tolerances: products of at most 7 factors and sums of
at most 128 terms, each rounded by 6e-8, with room for the condition of the inverse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2 import levels, tpu_chunk
from atomic_kernels.gdn2.levels import upper
from atomic_kernels.gdn2.tpu_layout import SUBLANES, Layout
from gdn2_cases import by_steps, in_order, log_decays

CHUNK = 128
FACTOR_LIMIT = 2e-6
INVERSE_LIMIT = 5e-6
SUM_LIMIT = 2e-6
LAYOUT = Layout(chunk=CHUNK, key_size=128, value_size=128, parts=1, interpret=True)
RUN = LAYOUT.run


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


@pytest.mark.parametrize("kind", ["mild", "spikes", "zero"])
def test_rows_carry_their_decay_through_the_levels(kind: str):
    """Rows of ones through all levels: every pair's factor, and exp(gc) and exp(gc_last - gc)."""
    g = log_decays(kind, CHUNK, 128)
    decay = jnp.asarray(by_steps(np.exp(g), SUBLANES), jnp.float32)
    totals = levels.block_totals(decay, SUBLANES)
    rows, keys = decay, jnp.ones_like(decay)
    sums = np.concatenate([np.zeros((1, g.shape[1])), np.cumsum(g, 0)])
    for level in range(LAYOUT.low_levels):
        rows = levels.climb_rows(rows, totals, level, SUBLANES)
        keys = levels.climb_keys(keys, totals, level, SUBLANES)
    factors = jax.jit(tpu_chunk.run_factors)(totals[-1])
    rows = tpu_chunk.scale_runs(
        jnp.asarray(in_order(np.asarray(rows), SUBLANES)), factors.before[-1]
    )
    keys = tpu_chunk.scale_runs(
        jnp.asarray(in_order(np.asarray(keys), SUBLANES)), factors.after[-1]
    )
    suffix = np.stack([np.sum(g[t + 1 :], 0) for t in range(CHUNK)])
    np.testing.assert_allclose(rows, np.exp(sums[1:]), rtol=1e-5, atol=1e-30, err_msg="exp(gc)")
    np.testing.assert_allclose(keys, np.exp(suffix), rtol=1e-5, atol=1e-30, err_msg="to the end")
    np.testing.assert_allclose(factors.total[0], np.exp(sums[-1]), rtol=1e-5, atol=1e-30)


def test_masks_cover_every_pair_once():
    """The union of the levels' masks is the strict lower triangle, each pair in one level."""
    count = np.zeros((CHUNK, CHUNK), int)
    tokens = by_steps(np.arange(CHUNK)[:, None], SUBLANES)
    for level in range(LAYOUT.low_levels):
        mask = np.asarray(tpu_chunk.low_level_mask(LAYOUT, level))
        rows = np.asarray(upper(jnp.asarray(tokens), SUBLANES << level))[:, 0]
        count[rows] += mask
    for level in range(3):
        mask = np.asarray(tpu_chunk.high_level_mask(CHUNK, 1 << level))
        rows = np.asarray(upper(jnp.arange(CHUNK)[:, None], RUN << level))[:, 0]
        count[rows] += mask
    np.testing.assert_array_equal(count, np.tril(np.ones((CHUNK, CHUNK), int), -1))


@pytest.mark.parametrize("mean_cosine", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("heads", [1, 6])
def test_leaf_inverses_are_exact_for_correlated_keys(mean_cosine: float, heads: int):
    """b = 2 and no decay: the hardest scores; heads differ, so a mixed-up lane shows."""
    generator = np.random.default_rng(int(10 * mean_cosine) + heads)
    block = np.arange(CHUNK) // RUN
    all_scores, wanted = [], []
    for _ in range(heads):
        shared = generator.standard_normal(128)
        keys = np.sqrt(1 - mean_cosine) * generator.standard_normal((CHUNK, 128))
        keys = keys + np.sqrt(mean_cosine) * shared
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        scores = np.tril(2.0 * keys @ keys.T, -1) * (block[:, None] == block[None])
        scores = scores.astype(np.float32)
        all_scores.append(jnp.asarray(by_steps(scores, SUBLANES)))
        wanted.append(np.linalg.inv(np.eye(CHUNK) + scores.astype(np.float64)))
    for head, found in enumerate(tpu_chunk.leaf_inverses(all_scores, LAYOUT)):
        error = relative(in_order(np.asarray(found), SUBLANES), wanted[head])
        assert error < INVERSE_LIMIT, f"head {head}: {error}"


def test_decays_get_the_rows_and_keys_that_straddle_them():
    """Rows' sums fall on the decays from the chunk's start to them, keys' on those after them."""
    rows, keys = np.random.default_rng(1).standard_normal((2, CHUNK, 128)).astype(np.float32)

    @jax.jit
    def passed_down(rows, keys, rows_by_steps, keys_by_steps):
        to_all = jnp.zeros((SUBLANES, 128))
        sums = tpu_chunk.run_sums(rows), tpu_chunk.run_sums(keys)
        for half in (4, 2, 1):
            to_all = tpu_chunk.pass_down_runs(to_all, *sums, half)
        for level in reversed(range(LAYOUT.low_levels)):
            to_all = levels.pass_down(to_all, rows_by_steps, keys_by_steps, level, SUBLANES)
        return to_all + rows_by_steps

    found = passed_down(rows, keys, by_steps(rows, SUBLANES), by_steps(keys, SUBLANES))
    wanted = np.flip(np.cumsum(np.flip(rows.astype(float), 0), 0), 0)
    wanted[1:] += np.cumsum(keys.astype(float), 0)[:-1]
    assert relative(in_order(np.asarray(found), SUBLANES), wanted) < SUM_LIMIT
