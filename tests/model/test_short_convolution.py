# SPDX-License-Identifier: Apache-2.0
"""The short convolution against a loop over tokens and taps in float64 numpy.

Protected: the order of the taps, segments, and the tail that continues a row (also one that ends
in padding). Limit: float32 rounding of four products.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import assert_close

from atomic_lib.model.context import make_context, move_real_tokens_first
from atomic_lib.model.short_convolution import short_convolution

BATCH, LENGTH, CHANNELS, TAPS = 2, 9, 3, 4
LIMIT = 1e-6


def silu(x):
    return x / (1 + np.exp(-x))


def loop(x, kernel, segment_ids):
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            for back in range(kernel.shape[0]):
                if t >= back and segment_ids[row, t - back] == segment_ids[row, t]:
                    out[row, t] += kernel[kernel.shape[0] - 1 - back] * x[row, t - back]
    return silu(out)


@pytest.fixture(scope="module")
def operands():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (BATCH, LENGTH, CHANNELS))
    return x, jax.random.normal(keys[1], (TAPS, CHANNELS))


@pytest.mark.parametrize(
    "segments", [[0] * 9, [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 1, 1, 2, 2]], ids=str
)
def test_output_equals_the_loop(operands, segments):
    x, kernel = operands
    ids = jnp.tile(jnp.array(segments), (BATCH, 1))
    context = make_context((BATCH, LENGTH), segment_ids=ids, placement=None, start=None)
    found, tail = short_convolution(x, kernel, None, context)
    wanted = loop(*(np.asarray(a, np.float64) for a in (x, kernel)), np.asarray(ids))
    assert_close("output", found, wanted, limit=LIMIT)
    np.testing.assert_array_equal(tail, x[:, -(TAPS - 1) :])


@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_a_padded_row_and_its_tail_continue_exactly(operands, cut):
    x, kernel = operands
    whole = make_context((BATCH, LENGTH), segment_ids=None, placement=None, start=None)
    wanted, _ = short_convolution(x, kernel, None, whole)
    mask = jnp.tile(jnp.arange(LENGTH) < cut, (BATCH, 1))
    placement = move_real_tokens_first(jnp.zeros((BATCH, LENGTH), jnp.int32), None, mask)
    head = make_context((BATCH, LENGTH), segment_ids=None, placement=placement, start=None)
    first, tail = short_convolution(jnp.where(mask[..., None], x, 99.0), kernel, None, head)
    np.testing.assert_array_equal(first[:, :cut], wanted[:, :cut])
    position = jnp.full((BATCH,), cut, jnp.int32)
    rest = make_context(
        (BATCH, LENGTH - cut),
        segment_ids=None,
        placement=None,
        start=(position, jnp.zeros_like(position)),
    )
    last, _ = short_convolution(x[:, cut:], kernel, tail, rest)
    np.testing.assert_array_equal(last, wanted[:, cut:])
