# SPDX-License-Identifier: Apache-2.0
"""States, padding and segments of a model that has every mixer.

Protected: a row that is read in pieces, padded or packed with others gives what it gives alone and
whole. The oracle is the model in one forward pass over an unpadded row, without state and with the
token-by-token recurrence, which test_mixers.py compares with formulas. The prefill goes otherwise:
the chunked recurrence, latent attention absorbed into the query, attention on a cache. What must be
exact is compared bit for bit. Elsewhere 5e-5 is allowed: float32 sums in another order through six
sublayers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    CHUNKED,
    FLOAT32,
    assert_close,
    lively_parameters,
    random_tokens,
    small_config,
)

from atomic_lib.model import bind_parameters, model_graph

LIMIT = 5e-5
LENGTH = 258  # two chunks of 128 and two tokens
PREFILLED = (128, 129, 191, 255)  # T mod 128 = 0, 1, 63, 127
CONFIG = small_config(
    "gdn2", "gdn2_conv", "mla", "attention", "window_attention",
    routing="hierarchical", gdn2_out_norm=True,
)  # fmt: skip


@functools.cache
def graph(execution):
    return model_graph(CONFIG, execution)


@functools.cache
def params():
    return lively_parameters(CONFIG)


@jax.jit
def run_whole(params, tokens, segment_ids):
    return bind_parameters(graph(FLOAT32), params)(tokens, segment_ids=segment_ids)[0]


def whole(rows, segment_ids=None):
    """Hidden vectors of whole rows, grown to six rows of LENGTH so that one program serves."""
    size = (6, LENGTH)
    grow = lambda x: jnp.pad(x, [(0, n - m) for n, m in zip(size, x.shape, strict=True)])  # noqa: E731
    segment_ids = jnp.zeros(rows.shape, jnp.int32) if segment_ids is None else segment_ids
    hidden = run_whole(params(), grow(rows), grow(segment_ids))
    return np.asarray(hidden)[: rows.shape[0], : rows.shape[1]]


@functools.partial(jax.jit, static_argnames="execution")
def run_piece(params, tokens, state, mask, segment_ids, *, execution):
    model = bind_parameters(graph(execution), params)
    return model(tokens, state=state, mask=mask, segment_ids=segment_ids)


def piece(tokens, state, mask=None, segment_ids=None, execution=FLOAT32):
    """One call on a state; mask and segment_ids are always passed, so that one program serves."""
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    segment_ids = jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    return run_piece(params(), tokens, state, mask, segment_ids, execution=execution)


def new_state(batch):
    return bind_parameters(graph(FLOAT32), params()).initial_state(batch, max_length=LENGTH)


@functools.cache
def reference():
    """One row and its hidden vectors [T, D]."""
    tokens = random_tokens(CONFIG, 1, LENGTH)
    return tokens[0], whole(tokens)[0]


@functools.cache
def prefilled():
    """The row's first 128, 129, 191, 255 tokens, each padded to 256, and what came of them."""
    tokens, _ = reference()
    lengths = jnp.array(PREFILLED)
    mask = jnp.arange(256)[None] < lengths[:, None]
    rows = jnp.where(mask, tokens[None, :256], 0)
    return piece(rows, new_state(len(PREFILLED)), mask, execution=CHUNKED)


@pytest.mark.parametrize("row", range(len(PREFILLED)), ids=PREFILLED)
def test_prefill_of_a_padded_row_equals_the_whole_row(row):
    hidden, state = prefilled()
    length = PREFILLED[row]
    assert_close("hidden", hidden[row, :length], reference()[1][:length], limit=LIMIT)
    assert int(state.position[row]) == length


def test_decoding_continues_rows_of_different_lengths():
    tokens, wanted = reference()
    _, state = prefilled()
    for step in range(3):
        at = np.array(PREFILLED) + step
        hidden, state = piece(tokens[at][:, None], state)
        assert_close(f"token {step} after the prefill", hidden[:, 0], wanted[at], limit=LIMIT)
    assert state.position.tolist() == [length + 3 for length in PREFILLED]


def test_a_row_of_padding_changes_no_bit_of_the_state():
    _, state = prefilled()
    rows = random_tokens(CONFIG, len(PREFILLED), 16, seed=9)
    hidden, after = piece(rows, state, jnp.zeros(rows.shape, bool))
    assert np.isfinite(hidden).all()
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True
    ):
        np.testing.assert_array_equal(new, old, err_msg=jax.tree_util.keystr(path))


def test_the_content_of_padding_changes_no_bit_of_anything_real():
    tokens = random_tokens(CONFIG, 4, 16)
    mask = jnp.array([[True] * 11 + [False] * 5, [False, True, True, False] * 4] * 2)
    outcomes = [piece(jnp.where(mask, tokens, filler), new_state(4), mask) for filler in (0, 5)]
    (hidden, state), (other_hidden, other_state) = outcomes
    np.testing.assert_array_equal(hidden[mask], other_hidden[mask])
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(other_state), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def test_padding_may_stand_anywhere():
    tokens, wanted = reference()
    mask = jnp.array([[False, True, True, False] * 4, [False] * 8 + [True] * 8] * 2)
    rows = jnp.zeros(mask.shape, tokens.dtype).at[mask].set(jnp.tile(tokens[:8], 4))
    hidden, _ = piece(rows, new_state(4), mask)
    for row in range(4):
        assert_close(f"row {row}", hidden[row][mask[row]], wanted[:8], limit=LIMIT)


def test_segments_of_a_row_do_not_see_each_other():
    lengths = (1, 2, 5, 61, 64, 125)  # together LENGTH
    tokens, _ = reference()
    ids = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=LENGTH)
    packed = whole(tokens[None], ids[None])[0]
    edges = [0, *itertools.accumulate(lengths)]
    # Each segment alone, as the first tokens of a row of its own.
    rows = np.zeros((len(lengths), LENGTH), np.int32)
    for row, (start, stop) in enumerate(itertools.pairwise(edges)):
        rows[row, : stop - start] = tokens[start:stop]
    alone = whole(jnp.asarray(rows))
    for row, (start, stop) in enumerate(itertools.pairwise(edges)):
        assert_close(f"segment {row}", packed[start:stop], alone[row, : stop - start], limit=LIMIT)


def test_a_state_continues_the_last_segment_only():
    tokens, _ = reference()
    head = jnp.tile(tokens[None, :16], (4, 1))
    ids = jnp.tile(jnp.array([[0] * 7 + [1] * 9]), (4, 1))
    _, state = piece(head, new_state(4), segment_ids=ids)
    found, state = piece(jnp.tile(tokens[None, 16:17], (4, 1)), state)
    alone = whole(tokens[None, 7:17])
    assert_close("token after the packed row", found[0, 0], alone[0, 9], limit=LIMIT)
    assert state.segment_start.tolist() == [7] * 4
    assert state.position.tolist() == [17] * 4
