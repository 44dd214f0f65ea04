# SPDX-License-Identifier: Apache-2.0
"""What a model holds and what a token costs, computed from its configuration alone. Free of JAX.

This is a second statement of the architecture, written from the formulas below and not from the
modules; the tests compare the two leaf by leaf. D hidden size, H heads, K head size, F feed-forward
size, R gate rank, L latent size, C content, P rotary and U value size of MLA:

    gdn2               7 D (H K)                               (+ H K with an out-norm)
    gdn2_conv          6 D (H K) + 3 taps (H K) + 2 R (D + H K) + H + 2 H K + K
    mla                D H (C + P) + D (L + P) + L H (C + U) + H U D
    attention          4 D (H K)                               (+ D (H K) with a gate)
    feed-forward       3 D F
    depth site         2 D
    norm               D, or 2 D for LayerNorm
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atomic_lib.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

GROUPS = ("embedding", "muon", "adamw_matrices", "vectors")


def parameter_group(name: str) -> str:
    """Returns the group of a parameter from its path.

    "embedding": the input and output tables. "muon": every matrix between them. "adamw_matrices":
    depthwise convolutions, whose rows are taps and not directions that Muon could orthogonalise.
    "vectors": everything with one axis (norm scales, biases, depth queries, decay parameters).
    """
    *_, owner, leaf = name.split("/") if "/" in name else ("", name)
    if leaf == "table":
        return "embedding"
    if leaf != "kernel":
        return "vectors"
    return "adamw_matrices" if owner.endswith("_conv") else "muon"


def _gdn2(config: "ModelConfig") -> Shapes:
    inner = config.num_heads * config.head_dim
    shapes: Shapes = {
        f"{n}/kernel": (config.hidden_size, inner) for n in ("q", "k", "v", "w", "b", "g")
    }
    shapes["o/kernel"] = (inner, config.hidden_size)
    if config.gdn2_out_norm:
        shapes["out_norm/scale"] = (inner,)
    return shapes


def _gdn2_conv(config: "ModelConfig") -> Shapes:
    width, rank = config.hidden_size, config.gate_rank
    inner = config.num_heads * config.head_dim
    shapes: Shapes = {f"{n}/kernel": (width, inner) for n in ("q", "k", "v", "w", "b")}
    shapes |= {f"{n}_conv/kernel": (config.conv_taps, inner) for n in ("q", "k", "v")}
    shapes |= {f"{n}_down/kernel": (width, rank) for n in ("decay", "gate")}
    shapes |= {f"{n}_up/kernel": (rank, inner) for n in ("decay", "gate")}
    shapes |= {"gate_up/bias": (inner,), "dt_bias": (inner,), "A_log": (config.num_heads,)}
    return shapes | {"out_norm/scale": (config.head_dim,), "o/kernel": (inner, width)}


def _mla(config: "ModelConfig") -> Shapes:
    width, heads, latent = config.hidden_size, config.attention_heads, config.mla_latent_dim
    content, rotary, value = config.mla_content_dim, config.mla_rotary_dim, config.mla_value_dim
    return {
        "q/kernel": (width, heads * (content + rotary)),
        "kv_down/kernel": (width, latent),
        "k_rotary/kernel": (width, rotary),
        "kv_up/kernel": (latent, heads * (content + value)),
        "o/kernel": (heads * value, width),
    }


def _attention(config: "ModelConfig") -> Shapes:
    inner = config.attention_heads * config.attention_head_dim
    names = ("q", "k", "v", "gate") if config.attention_gate else ("q", "k", "v")
    shapes: Shapes = {f"{name}/kernel": (config.hidden_size, inner) for name in names}
    return shapes | {"o/kernel": (inner, config.hidden_size)}


def _feed_forward(config: "ModelConfig") -> Shapes:
    inward = (config.hidden_size, config.ffn_size)
    return {"gate/kernel": inward, "up/kernel": inward, "down/kernel": inward[::-1]}


_MIXER_SHAPES = {
    "gdn2": _gdn2,
    "gdn2_conv": _gdn2_conv,
    "mla": _mla,
    "attention": _attention,
    "window_attention": _attention,
}


def _norm(config: "ModelConfig", name: str) -> Shapes:
    leaves = ("scale", "bias") if config.norm_family == "L" else ("scale",)
    return {f"{name}/{leaf}": (config.hidden_size,) for leaf in leaves}


def parameter_shapes(config: "ModelConfig") -> Shapes:
    """Returns the shape of every parameter by its path, e.g. "block_0/mixer_2/q/kernel"."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embedding/table": table}
    if config.norm_family == "R":
        shapes |= _norm(config, "embedding_norm")
    for block, sites in enumerate(config.depth_plan.reads):
        for sublayer, sources in zip(config.sublayers, sites, strict=True):
            path = f"block_{block}/{sublayer}"
            mixer = config.mixer_of(sublayer)
            inner = _feed_forward(config) if mixer is None else _MIXER_SHAPES[mixer](config)
            shapes |= {f"{path}/{name}": shape for name, shape in inner.items()}
            shapes |= _norm(config, f"{path}_norm")
            if config.norm_family == "R":
                shapes |= _norm(config, f"{path}_post_norm")
            if sources:
                shapes |= {
                    f"{path}_route/{n}": (config.hidden_size,) for n in ("query", "key_scale")
                }
    shapes |= _norm(config, "final_norm")
    if not config.tied_embedding:
        shapes["unembedding/table"] = table
    return shapes


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size


def parameter_counts(config: "ModelConfig") -> dict[str, int]:
    """Returns the parameters of each group of `GROUPS`."""
    counts = dict.fromkeys(GROUPS, 0)
    for name, shape in parameter_shapes(config).items():
        counts[parameter_group(name)] += _size(shape)
    return counts


def _mean_visible(sequence_length: int, window: int) -> float:
    """Keys that a query sees, averaged over the positions of a sequence; itself included."""
    width = min(window or sequence_length, sequence_length)
    return width - width * (width - 1) / (2 * sequence_length)


def _mixing_flops(config: "ModelConfig", mixer: str, sequence_length: int) -> float:
    """FLOPs a token of what a mixer does besides its matrices."""
    if mixer.startswith("gdn2"):
        # State K x V a head: decay (1), read at the erase keys (2), rank-one write (2), output (2).
        recurrence = 7 * config.num_heads * config.head_dim**2
        taps = config.conv_taps if mixer == "gdn2_conv" else 0
        return recurrence + 3 * 2 * taps * config.num_heads * config.head_dim
    window = config.window_size if mixer == "window_attention" else 0
    visible = _mean_visible(sequence_length, window)
    if mixer == "mla":
        width = config.mla_content_dim + config.mla_rotary_dim + config.mla_value_dim
    else:
        width = 2 * config.attention_head_dim
    return 2 * visible * config.attention_heads * width


def forward_flops_per_token(config: "ModelConfig", sequence_length: int) -> float:
    """Returns the FLOPs of one forward pass, logits included, divided by the tokens.

    A multiply-add is two FLOPs. Counted: every matrix once, the logits, attention over the causal
    half only, the GDN-2 recurrence as written (not the extra work of a chunked form), convolutions
    and depth reads (a score and a sum each). Not counted: norms, activations, softmax.
    """
    counts = parameter_counts(config)
    flops = 2.0 * (counts["muon"] + config.vocab_size * config.hidden_size)
    for mixer in config.block:
        flops += config.num_blocks * _mixing_flops(config, mixer, sequence_length)
    return flops + 4.0 * config.depth_plan.read_count * config.hidden_size
