# SPDX-License-Identifier: Apache-2.0
"""The configuration, its counts and the presets, without JAX.

Protected: the exact sizes of the four published systems, per optimiser group, and that a wrong
configuration is refused by name before anything compiles. The oracle for counts are the published
totals and the sums that the systems' cards state, written here as literals; the modules are
compared with the same formula in test_model_parameters.py.
"""

import dataclasses
import json
import subprocess
import sys

import pytest
from model_cases import small_config

from atomic_lib.model.accounting import parameter_group
from atomic_lib.model.config import ModelConfig
from atomic_lib.model.depth import Source, plan_depth
from atomic_lib.model.execution import Execution
from atomic_lib.presets import PRESETS, get_preset, parameter_count, preset_names

# total, embedding, Muon, AdamW matrices, vectors
PUBLISHED = {
    "atomic-baseline": (334_156_800, 51_463_168, 282_591_232, 0, 102_400),
    "atomic-hybrid": (307_131_392, 51_463_168, 255_524_864, 0, 143_360),
    # 18 GDN-2 layers of 5,188,230; conv 18 x 9,216; vectors 18 x (6 + 768 + 768 + 128) + 49 x 1024.
    "berlm-hyb16": (365_281_644, 32_768_000, 332_267_520, 165_888, 80_236),
    # Two tables; conv 16 x 12,288; vectors 16 x (8 + 1024 + 1024 + 128) + 33 x 1024.
    "gdn2-370m": (275_516_544, 65_536_000, 209_715_200, 196_608, 68_736),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_count_in_every_group(name):
    config = get_preset(name)
    found = (config.parameter_count, *config.parameter_counts.values())
    assert found == PUBLISHED[name]
    assert parameter_count(name) == PUBLISHED[name][0]


@pytest.mark.parametrize("family", ["L", "R"])
@pytest.mark.parametrize("name", ["atomic-baseline", "atomic-hybrid"])
def test_both_norm_families_give_the_published_total(name, family):
    config = dataclasses.replace(get_preset(name), norm_family=family)
    assert config.parameter_count == PUBLISHED[name][0]


def test_adamw_share_of_the_atomic_models():
    for name, share in (("atomic-baseline", 51_565_568), ("atomic-hybrid", 51_606_528)):
        counts = get_preset(name).parameter_counts
        assert counts["embedding"] + counts["vectors"] == share


def test_one_gdn2_layer_of_berlm_has_the_published_size():
    shapes = get_preset("berlm-hyb16").parameter_shapes
    layer = [s for name, s in shapes.items() if name.startswith("block_0/mixer_0/")]
    assert sum(a * (b[0] if b else 1) for a, *b in layer) == 5_188_230


@pytest.mark.parametrize(
    ("routing", "sites", "reads"),
    [("hierarchical", 34, 175), ("flat", 34, 595), ("block", 30, 105), ("none", 0, 0)],
)
def test_depth_plan_of_seven_blocks_of_five(routing, sites, reads):
    plan = plan_depth(routing, num_blocks=7, slots=5)
    assert (plan.site_count, plan.read_count) == (sites, reads)
    assert plan.reads[0][0] == ()


def test_hierarchical_sources_are_summaries_then_local_deltas():
    plan = plan_depth("hierarchical", num_blocks=3, slots=3)
    assert plan.reads[2][2] == (Source(0), Source(1), Source(2, 0), Source(2, 1))
    assert plan.consumers(Source(1)) == ((2, 0), (2, 1), (2, 2))
    assert plan.consumers(Source(1, 0)) == ((1, 1), (1, 2))
    assert plan.consumers(Source(2)) == ()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embedding/table", "embedding"),
        ("unembedding/table", "embedding"),
        ("block_0/mixer_2/q/kernel", "muon"),
        ("block_0/mixer_2/decay_up/kernel", "muon"),
        ("block_0/mixer_2/q_conv/kernel", "adamw_matrices"),
        ("block_0/mixer_2/A_log", "vectors"),
        ("block_0/mixer_2/gate_up/bias", "vectors"),
        ("block_0/ffn_route/query", "vectors"),
        ("final_norm/scale", "vectors"),
    ],
)
def test_parameter_group_of_a_name(name, group):
    assert parameter_group(name) == group


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block": ["gdn2", "mlaa"]}, ValueError, r"block: 'mlaa' .*did you mean 'mla'.*choose"),
        ({"block": []}, ValueError, r"block: it is empty"),
        ({"block": "gdn2"}, TypeError, r"block: expected a list .*'gdn2'"),
        ({"num_blocks": 0}, ValueError, r"num_blocks: 0 .*at least 1"),
        ({"num_blocks": "7"}, TypeError, r"num_blocks: expected an integer, got '7'"),
        ({"hidden_size": True}, TypeError, r"hidden_size: expected an integer, got True"),
        ({"num_heads": 0}, ValueError, r"num_heads: 0 .*mixer 'gdn2'.*at least 1"),
        ({"window_size": -1}, ValueError, r"window_size: -1 .*at least 0"),
        ({"norm_family": "X"}, ValueError, r"norm_family: 'X' .*'L', 'R', 'P'"),
        ({"norm_epsilon": 0.0}, ValueError, r"norm_epsilon: 0.0 .*> 0"),
        ({"norm_epsilon": "1e-6"}, TypeError, r"norm_epsilon: expected a number"),
        ({"tied_embedding": "no"}, TypeError, r"tied_embedding: expected true or false"),
        ({"routing": "tree"}, ValueError, r"routing: 'tree' .*'hierarchical'"),
        (
            {"routing_read": "replacement"},
            ValueError,
            r"routing_read: .*no effect with routing 'none'",
        ),
        ({"routing_summary_ffn": False}, ValueError, r"routing_summary_ffn: False has no effect"),
        ({"block": ["mla"], "mla_rotary_dim": 5}, ValueError, r"mla_rotary_dim: 5 is odd"),
        ({"block": ["mla"], "mla_latent_dim": 0}, ValueError, r"mla_latent_dim: 0 .*'mla'"),
        (
            {"block": ["window_attention"], "attention_head_dim": 7},
            ValueError,
            r"attention_head_dim: 7 is odd",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_configuration_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        small_config(**{"block": ("gdn2",), **changes})


def test_dictionary_round_trip_and_unknown_names():
    for name in preset_names():
        config = get_preset(name)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match=r"model.hiden_size: unknown .*'hidden_size'"):
        ModelConfig.from_dict({**get_preset("gdn2-370m").to_dict(), "hiden_size": 3})


def test_unknown_execution_is_refused():
    for key in ("compute_dtype", "gdn2_backend", "attention", "remat"):
        with pytest.raises(ValueError, match=rf"{key}: 'none-such' .*choose one of"):
            Execution(**{key: "none-such"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("atomic-hybird", r"'atomic-hybird' does not exist; did you mean 'atomic-hybrid'"),
        ("x", r"'x' does not exist; names: atomic-baseline, "),
        ("atomic-hybrid@50", r"write a number and k, m or b"),
        ("atomic-hybrid@999b", r"the dial goes from [\d,]+ to [\d,]+ parameters"),
        ("atomic-hybrid-smoke@5m", r"does not exist"),
    ],
)
def test_unknown_preset_is_refused_with_the_nearest_names(name, message):
    with pytest.raises(ValueError, match=message):
        get_preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_smoke_preset_keeps_the_shape_of_the_block(name):
    full, smoke = get_preset(name), get_preset(f"{name}-smoke")
    assert (smoke.block, smoke.routing, smoke.norm_family) == (
        full.block,
        full.routing,
        full.norm_family,
    )
    assert (smoke.vocab_size, smoke.hidden_size, smoke.num_blocks) == (50_257, 128, 2)
    assert (smoke.num_heads, smoke.head_dim) == (round(full.num_heads / 4), 64)
    assert smoke.parameter_count < 14_000_000


@pytest.mark.parametrize("size", ["20m", "50m", "125m", "350m", "1b"])
@pytest.mark.parametrize("name", PRESETS)
def test_size_dial_lands_near_its_number(name, size):
    wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    config = get_preset(f"{name}@{size}")
    # Steps of one width or one block: at the sizes tried here, neighbours are at most 30 % apart.
    assert abs(config.parameter_count / wanted - 1) < 0.2
    assert config.block == PRESETS[name].block
    assert config.num_heads * config.head_dim <= config.hidden_size


def test_size_dial_of_a_presets_own_size_is_the_preset():
    assert get_preset("atomic-hybrid@307m") == get_preset("atomic-hybrid")


def test_flops_of_a_token_are_the_sum_of_its_products():
    config = small_config("attention", num_blocks=2, attention_gate=False)
    # Per block: q, k, v, o are 32 x 32, gate, up, down 32 x 48; then the logits 61 x 32.
    matrices = 2 * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 61 * 32)
    # Causal over 5 tokens: 3 keys on average, scores and sum, 2 heads of 16, 2 blocks.
    attention = 2 * 2 * 3 * 2 * 16 * 2
    assert config.flops_per_token(5, training=False) == matrices + attention
    assert config.flops_per_token(5) == 3 * (matrices + attention)


def test_flops_of_a_window_count_the_keys_inside_it():
    full = small_config("attention", attention_gate=False)
    window = small_config("window_attention", attention_gate=False, window_size=2)
    # Of 4 tokens, the first sees 1 key and the others 2: 7/4 on average instead of 10/4.
    difference = full.flops_per_token(4, training=False) - window.flops_per_token(4, training=False)
    assert difference == 2 * (10 / 4 - 7 / 4) * 2 * (16 + 16)


def test_configuration_and_presets_do_not_import_jax():
    code = (
        "import sys; from atomic_lib.presets import get_preset; import atomic_lib.model; "
        "get_preset('atomic-hybrid').flops_per_token(2048); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
