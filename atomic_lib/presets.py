# SPDX-License-Identifier: Apache-2.0
"""The named models, as data. Free of JAX.

Sizes are those of the published systems; a comment marks each number that is our choice. Every
preset also exists in `-smoke` size (the same shape of block, small enough to train on a laptop's
CPU) and at `@SIZE` ("atomic-hybrid@50m"), where one number sets width, depth and heads.
"""

import bisect
import dataclasses
import difflib
import re
from typing import Any

from atomic_lib.model.config import ModelConfig

GPT2_VOCABULARY = 50_257
LLAMA2_VOCABULARY = 32_000

_ATOMIC: dict[str, Any] = {
    "vocab_size": GPT2_VOCABULARY,
    "hidden_size": 1024,
    "ffn_size": 3584,
    "num_blocks": 7,
    "num_heads": 8,
    "head_dim": 128,
    # The published totals fit two families of norms and do not tell which was used. "L" is our
    # choice; "R" gives the same counts.
    "norm_family": "L",
}

PRESETS: dict[str, ModelConfig] = {
    # Atomic-GDN2 Baseline: four GDN-2 mixers a block, ordinary residuals. 334,156,800 parameters.
    "atomic-baseline": ModelConfig(
        **_ATOMIC,
        block=("gdn2", "gdn2", "gdn2", "gdn2"),
        # The total leaves one vector a mixer in the Baseline alone; that it scales a norm of the
        # mixer's output is our reading.
        gdn2_out_norm=True,
    ),
    # Atomic-GDN2 hybrid: latent attention in the fourth slot, hierarchical depth routing.
    # 307,131,392 parameters.
    "atomic-hybrid": ModelConfig(
        **_ATOMIC,
        block=("gdn2", "gdn2", "gdn2", "mla"),
        attention_heads=8,
        mla_latent_dim=512,
        mla_content_dim=64,
        mla_rotary_dim=64,
        mla_value_dim=128,
        routing="hierarchical",
    ),
    # Berlm hyb16: 18 GDN-2 layers with short convolutions, gated attention without positions at
    # layers 3, 7, ..., 23, a feed-forward layer after each. 365,281,644 parameters.
    "berlm-hyb16": ModelConfig(
        vocab_size=LLAMA2_VOCABULARY,
        hidden_size=1024,
        ffn_size=2816,
        num_blocks=6,
        block=("gdn2_conv", "gdn2_conv", "gdn2_conv", "attention"),
        ffn_after="mixer",
        norm_family="P",
        num_heads=6,
        head_dim=128,
        conv_taps=4,
        gate_rank=128,
        attention_heads=8,
        attention_head_dim=128,
        attention_positions="nope",
        attention_gate=True,
    ),
    # GDN-2 370M as its card states it, embeddings untied: 275,516,544 parameters, not 370M.
    # (16 heads instead of 8 would give 380,603,648.)
    "gdn2-370m": ModelConfig(
        vocab_size=LLAMA2_VOCABULARY,
        hidden_size=1024,
        ffn_size=2048,
        num_blocks=16,
        block=("gdn2_conv",),
        tied_embedding=False,
        norm_family="P",
        norm_epsilon=1e-5,
        num_heads=8,
        head_dim=128,
        conv_taps=4,
        gate_rank=128,
    ),
}  # fmt: skip

SMOKE_SUFFIX = "-smoke"
_SIZE_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
# Widths that the size dial tries. Heads of 64 below 512 keep at least two of them in a small
# model; from 512 on they have the 128 channels of a TPU's lane.
_DIAL_WIDTHS = (*range(64, 512, 64), *range(512, 8192 + 1, 128))


def _resize(
    config: ModelConfig, *, hidden_size: int, num_blocks: int, head_dim: int
) -> ModelConfig:
    """Returns `config` at another width, with the proportions between its sizes kept."""
    scale, head_scale = hidden_size / config.hidden_size, head_dim / config.head_dim

    def heads(count: int) -> int:
        # The heads together stay the same fraction of the hidden size.
        return count and max(1, round(count * scale / head_scale))

    def width(size: int, factor: float) -> int:
        return size and max(2, 2 * round(size * factor / 2))

    return dataclasses.replace(
        config,
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        ffn_size=width(config.ffn_size, scale),
        num_heads=heads(config.num_heads),
        head_dim=head_dim,
        gate_rank=width(config.gate_rank, head_scale),
        attention_heads=heads(config.attention_heads),
        attention_head_dim=width(config.attention_head_dim, head_scale),
        mla_latent_dim=width(config.mla_latent_dim, scale),
        mla_content_dim=width(config.mla_content_dim, head_scale),
        mla_rotary_dim=width(config.mla_rotary_dim, head_scale),
        mla_value_dim=width(config.mla_value_dim, head_scale),
    )


def _smoke(config: ModelConfig) -> ModelConfig:
    """Two blocks of width 128 with heads of 64, for the GPT-2 tokens of the built-in corpus."""
    small = _resize(config, hidden_size=128, num_blocks=2, head_dim=64)
    return dataclasses.replace(small, vocab_size=GPT2_VOCABULARY)


def _at_width(config: ModelConfig, hidden_size: int) -> list[ModelConfig]:
    """Returns the models of this width whose depth is nearest to the preset's proportion."""
    depth = config.num_blocks * hidden_size / config.hidden_size
    head_dim = 64 if hidden_size < 512 else 128
    return [
        _resize(config, hidden_size=hidden_size, num_blocks=num_blocks, head_dim=head_dim)
        for num_blocks in sorted({max(1, int(depth)), int(depth) + 1})
    ]


def _dial(name: str, config: ModelConfig, size: str) -> ModelConfig:
    """Returns the model of the preset's proportions whose count is nearest to `size`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size.lower())
    if not match:
        raise ValueError(
            f"preset: {name!r} has size {size!r}; write a number and k, m or b, e.g. '@50m'"
        )
    target = float(match[1]) * _SIZE_UNITS[match[2]]
    smallest = _at_width(config, _DIAL_WIDTHS[0])[0].parameter_count
    largest = _at_width(config, _DIAL_WIDTHS[-1])[-1].parameter_count
    if not smallest <= target <= largest:
        raise ValueError(
            f"preset: {name!r} asks for {size}; the dial goes from {smallest:,} to {largest:,} "
            "parameters"
        )
    # Counts grow with the width, so only the widths beside the crossing can be nearest.
    crossing = bisect.bisect_left(
        _DIAL_WIDTHS, target, key=lambda width: _at_width(config, width)[0].parameter_count
    )
    widths = _DIAL_WIDTHS[max(0, crossing - 2) : crossing + 2]
    candidates = [candidate for width in widths for candidate in _at_width(config, width)]
    return min(candidates, key=lambda candidate: abs(candidate.parameter_count - target))


def preset_names() -> tuple[str, ...]:
    """Returns the fixed names: every preset and its smoke size. `NAME@SIZE` exists besides."""
    return tuple(name + suffix for name in PRESETS for suffix in ("", SMOKE_SUFFIX))


def get_preset(name: str) -> ModelConfig:
    """Returns the model called `name`: a preset, `PRESET-smoke` or `PRESET@SIZE`.

    Raises ValueError with the nearest names if there is no such preset, or if the size is no size.
    """
    base, at, size = name.partition("@")
    smoke = base.endswith(SMOKE_SUFFIX) and not at
    base = base.removesuffix(SMOKE_SUFFIX) if smoke else base
    if base not in PRESETS:
        close = difflib.get_close_matches(name, preset_names(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(
            f"preset: {name!r} does not exist; {hint}names: {', '.join(preset_names())}, "
            "or NAME@SIZE such as 'atomic-hybrid@50m'"
        )
    if smoke:
        return _smoke(PRESETS[base])
    return _dial(name, PRESETS[base], size) if at else PRESETS[base]


def parameter_count(name: str) -> int:
    """Returns the number of parameters of the model called `name`."""
    return get_preset(name).parameter_count
