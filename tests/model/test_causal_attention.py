# SPDX-License-Identifier: Apache-2.0
"""Causal attention, in chunks and through splash, against one softmax over a written-out mask.

Protected: masks at the edges of chunks and blocks, windows and segments, gradients (through the
recomputed chunks; through splash's own backward kernels, in interpret mode), and that no score
tensor grows with the square of the length. The oracle forms the whole [T, T] mask entry by entry in
numpy and computes in float64. Limit: float32 rounding of sums over T terms. Interpret mode does
not round operands as a TPU's matrix unit does, so it says nothing about that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import assert_close

from atomic_lib.model.causal_attention import MIN_CHUNK_ROWS, causal_attention
from atomic_lib.model.splash import splash_attention

LENGTH = 2 * MIN_CHUNK_ROWS + 3  # three chunks, the last of three rows; five blocks of splash
HEADS, SIZE, SCALE = 2, 4, 0.7
LIMIT = 2e-6
SEGMENTS = (1, MIN_CHUNK_ROWS, 100, LENGTH - 101 - MIN_CHUNK_ROWS)


@functools.cache
def operands():
    numbers = np.random.default_rng(0).normal(size=(4, 1, LENGTH, HEADS, SIZE))
    return jnp.asarray(numbers, jnp.float32)


def first_visible(segmented):
    if not segmented:
        return None
    starts = np.cumsum((0, *SEGMENTS[:-1]))
    return jnp.asarray(np.repeat(starts, SEGMENTS)[None], jnp.int32)


def mask_of(window, segmented):
    """[T, T] bool: may query t see key s?"""
    t, s = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    ids = np.repeat(np.arange(len(SEGMENTS)), SEGMENTS) if segmented else np.zeros(LENGTH)
    return (s <= t) & (t - s < (window or LENGTH)) & (ids[:, None] == ids[None])


def formula(q, k, v, mask):
    """The output, and its gradients for the cotangent `operands()[3]`, by hand."""
    scores = np.where(mask, np.einsum("bthk,bshk->bhts", q, k) * SCALE, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    d_o = np.asarray(operands()[3], np.float64)
    d_shares = np.einsum("bthv,bshv->bhts", d_o, v)
    d_scores = shares * (d_shares - np.sum(shares * d_shares, -1, keepdims=True)) * SCALE
    return {
        "o": np.einsum("bhts,bshv->bthv", shares, v),
        "dq": np.einsum("bhts,bshk->bthk", d_scores, k),
        "dk": np.einsum("bhts,bthk->bshk", d_scores, q),
        "dv": np.einsum("bhts,bthv->bshv", shares, d_o),
    }


IMPLEMENTATIONS = {
    "chunked": functools.partial(causal_attention, implementation="chunked"),
    "splash": functools.partial(splash_attention, interpret=True),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_output_and_gradients_equal_the_formula(window, segmented, implementation):
    attend = functools.partial(
        IMPLEMENTATIONS[implementation],
        scale=SCALE, window=window, first_visible=first_visible(segmented),
    )  # fmt: skip

    @jax.jit
    def run(q, k, v, d_o):
        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(d_o))

    exact = (np.asarray(part, np.float64) for part in operands()[:3])
    wanted = formula(*exact, mask_of(window, segmented))
    for (name, value), found in zip(wanted.items(), run(*operands()), strict=True):
        assert_close(name, found, value, limit=LIMIT * 10)


@pytest.mark.parametrize("window", [None, 100])
def test_dot_product_equals_chunked(window):
    q, k, v, _ = operands()
    run = functools.partial(causal_attention, scale=SCALE, window=window)
    by_name = jax.jit(functools.partial(run, implementation="dot_product"))
    assert_close("o", by_name(q, k, v), jax.jit(run)(q, k, v), limit=LIMIT)


def test_scores_do_not_grow_with_the_square_of_the_length():
    length = 4096
    shape = jax.ShapeDtypeStruct((1, length, 1, SIZE), jnp.float32)

    def loss(q, k, v):
        return causal_attention(q, k, v, scale=1.0).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).as_text()
    assert f"{MIN_CHUNK_ROWS}x{length}x" in text
    assert f"{length}x{length}x" not in text


def test_what_an_implementation_cannot_do_is_refused():
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match=r"implementation: 'flash' .*'chunked'"):
        causal_attention(q, k, v, scale=1.0, implementation="flash")
    named = functools.partial(causal_attention, q, k, scale=1.0, implementation="dot_product")
    with pytest.raises(NotImplementedError, match=r"segment_ids; choose attention 'chunked'"):
        named(v, first_visible=first_visible(True))
    with pytest.raises(NotImplementedError, match=r"values as wide as keys, got 3 and 4"):
        named(v[..., :3])
