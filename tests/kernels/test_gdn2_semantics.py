# SPDX-License-Identifier: Apache-2.0
"""Protects what depends on what: causality to the bit, splits, padding, segments, NaN, heads.

Most tests compare the operation with itself on changed inputs (bit for bit where the arithmetic
is the same); splits and segments compare with one call on the whole within 2e-6, a few units of
float32 rounding at these lengths.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2 import gdn2, gdn2_step
from gdn2_cases import NAMES, assert_close, assert_same_bits, run, small_inputs

LENGTH = 80
CHUNK = {"chunk_size": 32}
PER_TOKEN = NAMES[:6]


@pytest.mark.parametrize("token", [0, 1, 31, 32, 47, 78])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_outputs_do_not_change_with_later_tokens(token, precision):
    arrays = small_inputs(length=LENGTH)
    changed = {name: x.copy() for name, x in arrays.items()}
    later = small_inputs(length=LENGTH, seed=1)
    for name in PER_TOKEN:
        changed[name][:, token + 1 :] = 50 * later[name][:, token + 1 :]
    before, _ = run(arrays, precision=precision, **CHUNK)
    after, _ = run(changed, precision=precision, **CHUNK)
    assert_same_bits("o", before[:, : token + 1], after[:, : token + 1])
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("token", [0, 40, 63])
def test_a_nan_reaches_every_token_that_depends_on_it_and_no_other(name, token):
    arrays = small_inputs(length=LENGTH, batch=2, heads=2)
    clean_o, clean_state = run(arrays, **CHUNK)
    arrays[name][0, token, 0, 3] = np.nan
    o, state = (np.array(x) for x in run(arrays, **CHUNK))
    if name == "q":
        expected_o = np.zeros_like(o, bool)
        expected_o[0, token, 0] = True
        expected_state = np.zeros_like(state, bool)
    else:
        columns = [3] if name in "vw" else slice(None)
        expected_o = np.zeros_like(o, bool)
        expected_o[0, token:, 0, columns] = True
        expected_state = np.zeros_like(state, bool)
        expected_state[0, 0, :, columns] = True
    np.testing.assert_array_equal(np.isnan(o), expected_o)
    np.testing.assert_array_equal(np.isnan(state), expected_state)
    assert_same_bits("o", o[~expected_o], np.array(clean_o)[~expected_o])
    assert_same_bits("state", state[~expected_state], np.array(clean_state)[~expected_state])


@pytest.mark.parametrize("name", [*PER_TOKEN, "initial_state"])
def test_a_nan_ends_with_its_segment(name):
    arrays = small_inputs(length=LENGTH)
    ids = np.repeat([0, 1, 2], [40, 25, 15])[None].astype(np.int32)
    clean, clean_state = run(arrays, ids, **CHUNK)
    arrays[name][0, 5 if name != "initial_state" else 0, 0] = np.nan
    o, state = run(arrays, ids, **CHUNK)
    assert np.isnan(o[:, 5:40] if name != "q" else o[:, 5]).any()
    assert_same_bits("o", o[:, 40:], clean[:, 40:])
    assert_same_bits("state", state, clean_state)


def test_an_overflow_stays_visible():
    arrays = small_inputs(length=LENGTH)
    arrays["v"][0, 10, 0, 2] = 3e38
    arrays["k"][0, 10, 0] *= 1e3
    arrays["w"][0, 10, 0] = 1.0
    o, _ = run(arrays, **CHUNK)
    assert np.isfinite(o[:, :10]).all()
    assert not np.isfinite(o[0, 10:, 0, 2]).any()
    assert np.isfinite(np.delete(o, 2, axis=-1)).all()


@pytest.mark.parametrize("token", [1, 32, 50])
def test_a_run_split_anywhere_equals_the_whole(token):
    arrays = small_inputs(length=LENGTH)
    whole_o, whole_state = run(arrays, **CHUNK)
    first = {n: x[:, :token] if n in PER_TOKEN else x for n, x in arrays.items()}
    o_first, state = run(first, **CHUNK)
    second = {n: x[:, token:] for n, x in arrays.items() if n in PER_TOKEN}
    o_second, state = run(second | {"initial_state": np.asarray(state)}, **CHUNK)
    assert_close("o", np.concatenate([o_first, o_second], 1), whole_o, limit=2e-6)
    assert_close("state", state, whole_state, limit=2e-6)


@pytest.mark.parametrize("extra", [1, 40])
def test_padding_changes_nothing(extra):
    arrays = small_inputs(length=30)
    random = np.random.default_rng(2)
    padded = {"initial_state": arrays["initial_state"]}
    for name in PER_TOKEN:
        pad = random.standard_normal((1, extra, *arrays[name].shape[2:])).astype(np.float32)
        pad = np.zeros_like(pad) if name in "gbw" else pad
        padded[name] = np.concatenate([arrays[name], pad], 1)
    o, state = run(arrays)
    padded_o, padded_state = run(padded)
    assert_same_bits("o", padded_o[:, :30], o)
    assert_same_bits("state", padded_state, state)


@pytest.mark.parametrize(
    "lengths", [(1, 1, 2, 1), (2,) * 40, (31, 1, 33, 15), (80,)], ids=lambda x: f"{len(x)} segments"
)
def test_segments_equal_separate_calls(lengths):
    arrays = small_inputs(length=sum(lengths))
    ids = np.repeat(np.arange(len(lengths)) * 3, lengths)[None].astype(np.int32)
    o, state = run(arrays, ids, **CHUNK)
    start, parts = 0, []
    for n, length in enumerate(lengths):
        part = {m: arrays[m][:, start : start + length] for m in PER_TOKEN}
        part["initial_state"] = arrays["initial_state"] * (n == 0)
        o_part, state_part = run(part, backend="reference")
        parts.append(o_part)
        start += length
    assert_close("o", o, np.concatenate(parts, 1), limit=2e-6)
    assert_close("state", state, state_part, limit=2e-6)


def test_batch_elements_and_heads_are_independent():
    arrays = small_inputs(length=40, batch=2, heads=2, value_heads=4)
    before, state_before = run(arrays, **CHUNK)
    for name in ("v", "w"):
        arrays[name][1, :, 3] *= 7.0
    after, state_after = run(arrays, **CHUNK)
    before, after = np.array(before), np.array(after)
    assert not np.array_equal(before[1, :, 3], after[1, :, 3])
    after[1, :, 3] = before[1, :, 3]
    assert_same_bits("o", after, before)
    assert_same_bits("state", np.array(state_after)[:, :3], np.array(state_before)[:, :3])


def test_steps_equal_the_sequence():
    arrays = small_inputs(length=6, batch=2, heads=2, value_heads=4)
    o, state = run(arrays)
    now, outputs = arrays["initial_state"], []
    for t in range(6):
        o_t, now = gdn2_step(now, *(arrays[name][:, t] for name in PER_TOKEN))
        outputs.append(o_t)
    assert_close("o", np.stack(outputs, 1), o, limit=2e-6)
    assert_close("state", now, state, limit=2e-6)


def test_an_infinite_decay_forgets_everything():
    arrays = small_inputs(length=LENGTH)
    arrays["g"][:, 40] = -np.inf
    o, state = run(arrays, **CHUNK)
    after = {n: x[:, 40:] if n in PER_TOKEN else 0 * x for n, x in arrays.items()}
    want_o, want_state = run(after, backend="reference")
    assert_close("o", o[:, 40:], want_o, limit=2e-6)
    assert_close("state", state, want_state, limit=2e-6)


def test_vmap_equals_the_batch():
    arrays = small_inputs(length=20, batch=3)
    whole, _ = run(arrays, **CHUNK)

    def one_element(arrays):
        inputs = [arrays[name][None] for name in PER_TOKEN]
        return gdn2(*inputs, initial_state=arrays["initial_state"][None], backend="xla", **CHUNK)[0]

    mapped = jax.jit(jax.vmap(one_element))(jax.tree.map(jnp.asarray, arrays))
    assert_close("o", mapped[:, 0], whole, limit=2e-6)
