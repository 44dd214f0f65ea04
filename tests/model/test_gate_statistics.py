# SPDX-License-Identifier: Apache-2.0
"""Protects the counters of gate saturation, and that looking changes nothing that is learned.

Oracle of the numbers: numpy, float64, which activates the gates and counts. Shares are counts, so
they must be equal; the decay is rounded in float32, 1e-6 relative. Oracle of "changes nothing":
loss and gradients of the model whose statistics are thrown away, bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import lively_parameters, small_config

from atomic_lib.model import Execution, bind_parameters, model_graph
from atomic_lib.model.gate_statistics import (
    GateStatistics,
    gate_statistics,
    merge_statistics,
    stack_statistics,
)

SHAPE = (2, 256, 3, 8)  # two periods of 128 tokens, of which the first 16 count


def statistics_of(raw, **given):
    """raw: three arrays [B, T, H, K]."""
    decay, erase, write = (jnp.asarray(x, jnp.float32) for x in raw)
    flat = (*erase.shape[:2], -1)
    return gate_statistics(decay, erase.reshape(flat), write.reshape(flat), **given)


def counted(raw_decay, raw_erase, raw_write, A_log, dt_bias):
    """The statistics by brute force."""
    sampled = np.arange(raw_erase.shape[1]) % 128 < 16
    erase, write = (1 / (1 + np.exp(-x[:, sampled])) for x in (raw_erase, raw_write))
    g = -np.exp(A_log)[:, None] * np.log1p(np.exp(raw_decay + dt_bias))
    return {
        "erase_low": (erase < 0.01).mean(),
        "erase_high": (erase > 0.99).mean(),
        "write_low": (write < 0.01).mean(),
        "write_high": (write > 0.99).mean(),
        "decay_min": g.min(),
    }


@pytest.mark.parametrize("with_rates", [False, True], ids=["plain", "A_log and dt_bias"])
def test_statistics_count_gates_and_find_the_rarest_decay(with_rates):
    rng = np.random.default_rng(3)
    raw = [rng.normal(size=SHAPE, scale=4.0) for _ in range(3)]
    raw[0][1, 5, 2, 4] = 60.0  # one spike: a decay of -60 nats or more
    rates = {"A_log": rng.normal(size=3), "dt_bias": rng.normal(size=(3, 8))}
    wanted = counted(*raw, *(rates[n] if with_rates else 0 * rates[n] for n in rates))
    given = {n: jnp.asarray(v, jnp.float32) for n, v in rates.items()} if with_rates else {}
    found = statistics_of(raw, **given)
    for name, value in wanted.items():
        assert getattr(found, name).dtype == jnp.float32, name
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-6, err_msg=name)
    assert 0 < wanted["erase_low"] < wanted["erase_low"] + wanted["erase_high"] < 1
    assert wanted["decay_min"] < -20


def test_a_broken_projection_is_not_hidden():
    # XLA on a CPU (jax 0.10 to 0.12) loses a NaN in the maximum of a large array; there it is the
    # loss that shows it.
    raw = jnp.zeros((2, 24, 3, 8)).at[0, 17, 0, 0].set(jnp.nan)
    assert np.isnan(statistics_of((raw, raw, raw)).decay_min)


def test_a_row_without_whole_periods_counts_in_full():
    raw = np.random.default_rng(5).normal(size=(3, 2, 24, 3, 8), scale=4.0)
    found = statistics_of(raw)
    for name, low, high in (("erase", found.erase_low, found.erase_high),
                            ("write", found.write_low, found.write_high)):  # fmt: skip
        x = raw[1 if name == "erase" else 2]
        np.testing.assert_allclose(low, (x < -np.log(99)).mean(), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(high, (x > np.log(99)).mean(), rtol=1e-6, err_msg=name)


def test_parts_merge_to_the_whole():
    rng = np.random.default_rng(4)
    raw = [jnp.asarray(rng.normal(size=SHAPE, scale=4.0), jnp.float32) for _ in range(3)]
    parts = [statistics_of([x[row : row + 1] for x in raw]) for row in range(2)]
    merged = merge_statistics(stack_statistics(parts))
    for name, found, wanted in zip(GateStatistics._fields, merged, statistics_of(raw), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)


def test_a_model_without_gates_has_no_statistics():
    config = small_config("attention", num_blocks=1)
    graph, params = model_graph(config, Execution()), lively_parameters(config)
    tokens = jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(lambda p: bind_parameters(graph, p).observed(tokens)[2], params)
    assert shapes is None
    assert config.gated_mixers == ()


def test_watching_the_gates_changes_no_bit():
    config = small_config("gdn2_conv")
    execution = Execution(compute_dtype="bfloat16", remat="save_dots", gdn2_backend="reference")
    graph = model_graph(config, execution)
    params = lively_parameters(config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, size=(2, 12)), jnp.int32)

    def watched(params):
        hidden, _, gates = bind_parameters(graph, params).observed(tokens)
        return jnp.sum(hidden.astype(jnp.float32) ** 3), gates

    def unwatched(params):
        hidden, _ = bind_parameters(graph, params)(tokens)
        return jnp.sum(hidden.astype(jnp.float32) ** 3)

    (loss, gates), gradients = jax.jit(jax.value_and_grad(watched, has_aux=True))(params)
    wanted_loss, wanted = jax.jit(jax.value_and_grad(unwatched))(params)
    assert gates.decay_min.shape == (len(config.gated_mixers),) == (1,)
    assert np.isfinite(gates.decay_min).all()
    assert loss.tobytes() == wanted_loss.tobytes()
    for name, value in wanted.items():
        assert gradients[name].tobytes() == value.tobytes(), name
