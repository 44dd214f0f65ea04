# SPDX-License-Identifier: Apache-2.0
"""States, padding and segments of a model that has every mixer.

Protected: a row that is read in pieces, padded or packed with others gives what it gives alone and
whole. The oracle is the model itself in one forward pass over an unpadded row, without state, which
test_mixers.py compares with formulas; the paths differ (chunked recurrence against single steps,
expanded against absorbed latent attention, self-attention against a cache). What must be exact is
compared bit for bit. Elsewhere 5e-5 is allowed: float32 sums in another order through seven
sublayers; worst measured 4e-6.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FLOAT32, assert_close, lively_parameters, random_tokens, small_config

from atomic_lib.model import bind_parameters, model_graph

LIMIT = 5e-5
LENGTH = 258  # two chunks of 128 and two tokens
PREFILLED = (128, 129, 191, 255)  # T mod 128 = 0, 1, 63, 127
CONFIG = small_config(
    "gdn2", "gdn2_conv", "mla", "attention", "window_attention",
    routing="hierarchical", gdn2_out_norm=True,
)  # fmt: skip


@functools.cache
def graph():
    return model_graph(CONFIG, FLOAT32)


@functools.cache
def params():
    return lively_parameters(CONFIG)


@jax.jit
def whole(params, tokens, segment_ids=None):
    return bind_parameters(graph(), params)(tokens, segment_ids=segment_ids)[0]


@jax.jit
def piece(params, tokens, state, mask=None, segment_ids=None):
    model = bind_parameters(graph(), params)
    return model(tokens, state=state, mask=mask, segment_ids=segment_ids)


def new_state(batch):
    return bind_parameters(graph(), params()).initial_state(batch, max_length=LENGTH)


@functools.cache
def reference():
    """One row and its hidden vectors [T, D]."""
    tokens = random_tokens(CONFIG, 1, LENGTH)
    return tokens[0], np.asarray(whole(params(), tokens))[0]


@functools.cache
def prefilled():
    """The row's first 128, 129, 191, 255 tokens, each padded to 256, and what came of them."""
    tokens, _ = reference()
    lengths = jnp.array(PREFILLED)
    mask = jnp.arange(256)[None] < lengths[:, None]
    rows = jnp.where(mask, tokens[None, :256], 0)
    return piece(params(), rows, new_state(len(PREFILLED)), mask)


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
        hidden, state = piece(params(), tokens[at][:, None], state)
        assert_close(f"token {step} after the prefill", hidden[:, 0], wanted[at], limit=LIMIT)
    assert state.position.tolist() == [length + 3 for length in PREFILLED]


def test_a_row_of_padding_changes_no_bit_of_the_state():
    _, state = prefilled()
    rows = random_tokens(CONFIG, len(PREFILLED), 16, seed=9)
    hidden, after = piece(params(), rows, state, jnp.zeros(rows.shape, bool))
    assert np.isfinite(hidden).all()
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True
    ):
        np.testing.assert_array_equal(new, old, err_msg=jax.tree_util.keystr(path))


def test_the_content_of_padding_changes_no_bit_of_anything_real():
    tokens = random_tokens(CONFIG, 2, 16)
    mask = jnp.array([[True] * 11 + [False] * 5, [False, True, True, False] * 4])
    outcomes = [
        piece(params(), jnp.where(mask, tokens, filler), new_state(2), mask) for filler in (0, 5)
    ]
    (hidden, state), (other_hidden, other_state) = outcomes
    np.testing.assert_array_equal(hidden[mask], other_hidden[mask])
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(other_state), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def test_padding_may_stand_anywhere():
    tokens, wanted = reference()
    mask = jnp.array([[False, True, True, False] * 4, [False] * 8 + [True] * 8])
    rows = jnp.zeros(mask.shape, tokens.dtype)
    rows = rows.at[mask].set(jnp.concatenate([tokens[:8], tokens[:8]]))
    hidden, _ = piece(params(), rows, new_state(2), mask)
    for row in range(2):
        assert_close(f"row {row}", hidden[row][mask[row]], wanted[:8], limit=LIMIT)


def test_segments_of_a_row_do_not_see_each_other():
    lengths = (1, 2, 5, 61, 64, 125)  # together LENGTH
    tokens, _ = reference()
    segment_ids = jnp.repeat(
        jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=LENGTH
    )
    packed = whole(params(), tokens[None], segment_ids[None])[0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # Each segment alone, as the first tokens of a row of its own.
    rows = np.zeros((len(lengths), LENGTH), np.int32)
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        rows[row, : stop - start] = tokens[start:stop]
    alone = whole(params(), jnp.asarray(rows))
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        assert_close(f"segment {row}", packed[start:stop], alone[row, : stop - start], limit=LIMIT)


def test_a_state_continues_the_last_segment_only():
    tokens, _ = reference()
    head = tokens[None, :16]
    segment_ids = jnp.array([[0] * 7 + [1] * 9])
    _, state = piece(params(), head, new_state(1), segment_ids=segment_ids)
    found, state = piece(params(), tokens[None, 16:17], state)
    alone = whole(params(), jnp.pad(tokens[None, 7:17], ((0, 0), (0, LENGTH - 10))))
    assert_close("token after the packed row", found[0, 0], alone[0, 9], limit=LIMIT)
    assert int(state.segment_start[0]) == 7
    assert int(state.position[0]) == 17
