# SPDX-License-Identifier: Apache-2.0
"""The modules' parameters: names, shapes, sizes, groups, and what they start as.

Protected: that each preset's modules hold exactly the parameters of its formula (the formula is
compared with published totals in test_model_config.py), without allocating any, and that a run's
start depends on its seed alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import FLOAT32, small_config

from atomic_lib.model import (
    LanguageModel,
    abstract_parameters,
    bind_parameters,
    init_parameters,
    model_graph,
    named_parameters,
    parameter_groups,
)
from atomic_lib.presets import PRESETS, get_preset, preset_names

VARIANTS = {
    **{name: get_preset(name) for name in preset_names()},
    **{
        f"{name}-R": dataclasses.replace(PRESETS[name], norm_family="R")
        for name in ("atomic-baseline", "atomic-hybrid")
    },
    "windowed": small_config("window_attention", attention_gate=False, tied_embedding=False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_modules_hold_the_parameters_of_the_formula(name):
    config = VARIANTS[name]
    found = abstract_parameters(config)
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype("float32")}
    assert {path: leaf.shape for path, leaf in found.items()} == config.parameter_shapes
    assert sum(leaf.size for leaf in found.values()) == config.parameter_count
    sizes = dict.fromkeys(config.parameter_counts, 0)
    for path, group in parameter_groups(found).items():
        sizes[group] += found[path].size
    assert sizes == config.parameter_counts


def test_names_are_those_of_an_export():
    names = set(abstract_parameters(get_preset("atomic-hybrid")))
    assert {
        "embedding/table",
        "block_0/mixer_2/q/kernel",
        "block_6/mixer_3/kv_up/kernel",
        "block_6/mixer_3_route/key_scale",
        "block_0/ffn/down/kernel",
        "block_0/ffn_norm/scale",
        "final_norm/bias",
    } <= names
    assert "block_0/mixer_0_route/query" not in names


@pytest.fixture(scope="module")
def started():
    """Parameters of a model with every kind of parameter, from seed 1."""
    config = small_config("gdn2", "gdn2_conv", "mla", hidden_size=96, routing="hierarchical")
    return config, init_parameters(config, 1)


def test_a_start_is_decided_by_its_seed(started):
    config, params = started
    again, other = init_parameters(config, 1), init_parameters(config, 2)
    made = named_parameters(LanguageModel(config, rngs=nnx.Rngs(1)))
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
        np.testing.assert_array_equal(made[name], value, err_msg=name)
        random = name.endswith(("kernel", "table", "A_log", "dt_bias"))
        assert random != bool((other[name] == value).all()), name


def test_parameters_start_as_stated(started):
    config, params = started
    for name, value in params.items():
        assert np.isfinite(value).all(), name
        if name.endswith("A_log"):
            assert (value >= 0).all(), name
            assert (value <= np.log(16)).all(), name
        elif name.endswith("dt_bias"):
            step = np.log1p(np.exp(np.asarray(value, np.float64)))
            assert (step > 0.999e-3).all(), name
            assert (step < 0.1001).all(), name
        elif name.endswith(("query", "bias")):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        elif name.endswith("table"):
            assert np.std(value) == pytest.approx(0.02, rel=0.05)
        elif name.endswith("_conv/kernel"):
            assert np.abs(value).max() <= 0.5, name
            assert np.std(value) == pytest.approx(0.5 / 3**0.5, rel=0.2), name
        else:
            writes = name.endswith(("/o/kernel", "down/kernel")) and "decay" not in name
            writes = writes and "kv_down" not in name and "gate_down" not in name
            fan_in = value.shape[0] * (config.sublayer_count if writes else 1)
            assert np.std(value) == pytest.approx(fan_in**-0.5, rel=0.15), name


def test_binding_parameters_makes_the_model_again(started):
    config, params = started
    model = bind_parameters(model_graph(config, FLOAT32), params)
    found = named_parameters(model)
    assert list(found) == sorted(params)
    assert all((found[name] == params[name]).all() for name in params)
    assert model.output_embedding().shape == (config.vocab_size, config.hidden_size)


def test_a_tied_table_is_both_input_and_output():
    tokens = jnp.zeros((1, 1), jnp.int32)
    for tied in (True, False):
        config = small_config("attention", tied_embedding=tied)
        graph, params = model_graph(config, FLOAT32), init_parameters(config, 0)

        def logits(params, graph=graph):
            model = bind_parameters(graph, params)
            return model.logits(model(tokens)[0]).sum()

        gradients = jax.jit(jax.grad(logits))(params)
        table = gradients["embedding/table" if tied else "unembedding/table"]
        assert ("unembedding/table" in gradients) != tied
        # Every row of the output table feels the sum of the logits.
        assert (jnp.abs(table).max(axis=1) > 0).all()
