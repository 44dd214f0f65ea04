# SPDX-License-Identifier: Apache-2.0
"""The model as a whole: dtypes, dropout, recomputation, refusals, and the smoke presets.

Protected: what the trainer and the evaluator rely on. Oracles: another execution of the same model
(recomputing more or less must not change gradients), properties that hold by definition, and
ln(vocabulary) for the loss of a model that knows nothing.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    FLOAT32,
    assert_close,
    lively_parameters,
    random_tokens,
    small_config,
)

from atomic_lib.model import Execution, bind_parameters, init_parameters, model_graph
from atomic_lib.presets import get_preset

CONFIG = small_config("gdn2", "mla", routing="hierarchical")


def forward(config, execution=FLOAT32, **options):
    graph = model_graph(config, execution)

    @jax.jit
    def run(params, tokens, **arrays):
        model = bind_parameters(graph, params)
        hidden, _ = model(tokens, **options, **arrays)
        return hidden, model.logits(hidden)

    return run


# The notebooks' smoke runs start the other two.
@pytest.mark.parametrize("preset", ["berlm-hyb16", "gdn2-370m"])
def test_a_new_smoke_model_knows_nothing(preset):
    config = dataclasses.replace(get_preset(f"{preset}-smoke"), vocab_size=512)
    tokens = random_tokens(config, 2, 9)
    _, logits = forward(config)(init_parameters(config, 1), tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    # Logits of a 0.02 table on normed vectors vary by 0.02 sqrt(128) = 0.23.
    assert abs(-float(chosen.mean()) - math.log(config.vocab_size)) < 0.3


def test_bfloat16_changes_dtypes_and_little_else():
    params, tokens = lively_parameters(CONFIG), random_tokens(CONFIG, 2, 8)
    exact, _ = forward(CONFIG)(params, tokens)
    coarse = dataclasses.replace(FLOAT32, compute_dtype="bfloat16")
    hidden, logits = forward(CONFIG, coarse)(params, tokens)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    # 2^-9 a rounding, about thirty of them in a row.
    difference = np.asarray(hidden, np.float32) - np.asarray(exact)
    assert np.sqrt(np.mean(difference**2)) < 30 * 2**-9 * np.sqrt(np.mean(exact**2))


@functools.cache
def gradients(remat):
    config = small_config("gdn2")
    tokens, keys = random_tokens(config, 4, 8), jax.random.split(jax.random.key(3), 4)
    run = forward(config, dataclasses.replace(FLOAT32, remat=remat), dropout_rate=0.3)

    def loss(params):
        return jnp.sum(jnp.sin(run(params, tokens, dropout_keys=keys)[1]))

    return jax.jit(jax.grad(loss))(lively_parameters(config))


@pytest.mark.parametrize("remat", ["save_dots", "save_nothing"])
def test_recomputation_changes_no_gradient(remat):
    kept, recomputed = gradients("none"), gradients(remat)
    for name, value in kept.items():
        assert_close(name, recomputed[name], value, limit=2e-5)


def test_dropout_belongs_to_the_row_and_its_key():
    params, tokens = lively_parameters(CONFIG), random_tokens(CONFIG, 4, 8)
    keys = jax.random.split(jax.random.key(0), 4)
    run = forward(CONFIG, dropout_rate=0.5)
    hidden, _ = run(params, tokens, dropout_keys=keys)
    again, _ = run(params, tokens[::-1], dropout_keys=keys[::-1])
    assert_close("rows in another order", again[::-1], hidden, limit=1e-5)
    other, _ = run(params, tokens, dropout_keys=keys[::-1])
    assert not np.allclose(other, hidden, atol=1e-2)
    off, _ = forward(CONFIG)(params, tokens)
    without_keys, _ = run(params, tokens)
    assert_close("no keys, no dropout", without_keys, off, limit=1e-5)


def test_a_token_outside_the_vocabulary_is_not_hidden():
    params, tokens = lively_parameters(CONFIG), random_tokens(CONFIG, 2, 8)
    hidden, _ = forward(CONFIG)(params, tokens.at[0, 5].set(CONFIG.vocab_size))
    # Attention gives a later key the weight 0, and 0 * NaN is NaN, so all of the row may be NaN.
    assert np.isnan(hidden[0, 5:]).all()
    assert np.isfinite(hidden[1]).all()


def test_later_tokens_change_no_earlier_output():
    params, tokens = lively_parameters(CONFIG), random_tokens(CONFIG, 2, 8)
    run = forward(CONFIG)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % CONFIG.vocab_size)
    before, after = run(params, tokens)[0], run(params, changed)[0]
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tokens": np.zeros(3, np.int32)},
            r"tokens: expected integers \[B, T\], got int32 \(3,\)",
        ),
        ({"tokens": np.zeros((2, 3), np.float32)}, r"tokens: expected integers .* got float32"),
        (
            {"segment_ids": np.zeros((2, 4), np.int32)},
            r"segment_ids: expected .*\(2, 3\).*\(2, 4\)",
        ),
        ({"mask": np.ones((2, 3), np.int32)}, r"mask: expected .* got int32 \(2, 3\)"),
        ({"dropout_rate": 1.0}, r"dropout_rate: 1.0 .*\[0, 1\)"),
        (
            {"dropout_rate": 0.1, "dropout_keys": np.zeros(())},
            r"dropout_keys: expected one key a row, \(2,\), got \(\)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    model = bind_parameters(model_graph(CONFIG, Execution()), init_parameters(CONFIG, 0))
    arguments = {"tokens": np.zeros((2, 3), np.int32), **arguments}
    with pytest.raises(ValueError, match=message):
        model(**arguments)
