# SPDX-License-Identifier: Apache-2.0
"""What a language model is: the one configuration of every model here. Free of JAX.

A model is an embedding, `num_blocks` equal blocks, a final norm and logits. A block is a list of
token mixers with a feed-forward layer after the block or after each mixer. Each of these sublayers
f changes the residual stream x by

    y = f(norm(x + r)),   x <- x + y,

where r is what depth routing reads (see `depth.py`; 0 without routing).
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from atomic_lib.model.depth import ROUTINGS, DepthPlan, plan_depth

MIXERS = ("gdn2", "gdn2_conv", "mla", "attention", "window_attention")
FFN_PLACES = ("block", "mixer")
NORM_FAMILIES = ("L", "R", "P")
POSITIONS = ("rope", "nope")
ROUTING_READS = ("additive", "replacement")

_CHOICES = {
    "ffn_after": FFN_PLACES,
    "norm_family": NORM_FAMILIES,
    "attention_positions": POSITIONS,
    "window_positions": POSITIONS,
    "routing": ROUTINGS,
    "routing_read": ROUTING_READS,
}
_SIZES = ("vocab_size", "hidden_size", "ffn_size", "num_blocks")
_FLAGS = ("tied_embedding", "gdn2_out_norm", "attention_gate", "routing_summary_ffn")
_NUMBERS = ("norm_epsilon", "rope_theta")
# What each mixer cannot do without.
_NEEDS = {
    "gdn2": ("num_heads", "head_dim"),
    "gdn2_conv": ("num_heads", "head_dim", "conv_taps", "gate_rank"),
    "mla": (
        "attention_heads",
        "mla_latent_dim",
        "mla_content_dim",
        "mla_rotary_dim",
        "mla_value_dim",
    ),
    "attention": ("attention_heads", "attention_head_dim"),
    "window_attention": ("attention_heads", "attention_head_dim", "window_size"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, and nothing about how it is trained or computed.

    Sizes of mixers that no block uses may stay 0. Raises ValueError for a value that is not
    allowed and TypeError for one of the wrong kind, naming the key, the value and what is allowed.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_blocks: int
    block: tuple[str, ...]  # the token mixers of one block, in order
    ffn_after: str = "block"  # one feed-forward layer a "block", or one after each "mixer"
    tied_embedding: bool = True

    # "L": LayerNorm before each sublayer, and a final one.
    # "R": RMSNorm before and after each sublayer, after the embedding, and a final one.
    # "P": RMSNorm before each sublayer, and a final one.
    norm_family: str = "L"
    norm_epsilon: float = 1e-6

    num_heads: int = 0  # of the GDN-2 mixers
    head_dim: int = 0  # of their keys and of their values
    gdn2_out_norm: bool = False  # "gdn2" only: RMSNorm of each head's output
    conv_taps: int = 0  # "gdn2_conv" only: length of the short convolutions
    gate_rank: int = 0  # "gdn2_conv" only: inner width of the decay and output gates

    attention_heads: int = 0  # of "mla", "attention" and "window_attention"
    attention_head_dim: int = 0
    attention_positions: str = "nope"
    attention_gate: bool = False  # sigmoid output gate, a full matrix
    window_size: int = 0  # tokens that a query sees, itself included
    window_positions: str = "rope"
    mla_latent_dim: int = 0  # width of the shared latent of keys and values
    mla_content_dim: int = 0  # of each query and key head, without position
    mla_rotary_dim: int = 0  # of each query head and of the one rotary key
    mla_value_dim: int = 0  # of each value head
    rope_theta: float = 10_000.0

    routing: str = "none"  # "hierarchical", "flat", "block" or "none"
    routing_read: str = "additive"  # or "replacement": a sublayer's input is norm(r), without x
    routing_summary_ffn: bool = True  # whether a block's summary includes its feed-forward deltas

    def __post_init__(self):
        self._refuse_bad_block()
        self._refuse_bad_kinds()
        for mixer in dict.fromkeys(self.block):
            for key in _NEEDS[mixer]:
                if getattr(self, key) == 0:
                    raise ValueError(
                        f"{key}: 0 is not allowed with mixer {mixer!r}; it must be at least 1"
                    )
        self._refuse_bad_combinations()

    def _refuse_bad_block(self):
        if isinstance(self.block, str) or not isinstance(self.block, (tuple, list)):
            raise TypeError(f"block: expected a list of mixer names, got {self.block!r}")
        object.__setattr__(self, "block", tuple(self.block))
        if not self.block:
            raise ValueError(f"block: it is empty; list at least one mixer of {MIXERS}")
        for mixer in self.block:
            if mixer not in MIXERS:
                raise ValueError(
                    f"block: {mixer!r} is not a mixer{_nearest(mixer, MIXERS)}; "
                    f"choose from {MIXERS}"
                )

    def _refuse_bad_kinds(self):
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key}: {value!r} is not allowed; choose one of {allowed}")
        for key in _FLAGS:
            value = getattr(self, key)
            if not isinstance(value, bool):
                raise TypeError(f"{key}: expected true or false, got {value!r}")
        for key in _NUMBERS:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{key}: expected a number, got {value!r}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{key}: {value!r} is not allowed; it must be finite and > 0")
        others = {*_CHOICES, *_FLAGS, *_NUMBERS, "block"}
        for key in (field.name for field in fields(self) if field.name not in others):
            value, least = getattr(self, key), 1 if key in _SIZES else 0
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{key}: expected an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{key}: {value} is not allowed; it must be at least {least}")

    def _refuse_bad_combinations(self):
        rotary = {"mla_rotary_dim": "mla" in self.block}
        rotary["attention_head_dim"] = (
            "attention" in self.block and self.attention_positions == "rope"
        ) or ("window_attention" in self.block and self.window_positions == "rope")
        for key, used in rotary.items():
            if used and getattr(self, key) % 2:
                raise ValueError(
                    f"{key}: {getattr(self, key)} is odd; rotary positions turn pairs of channels, "
                    "so it must be even"
                )
        if self.routing == "none" and self.routing_read != "additive":
            raise ValueError(
                f"routing_read: {self.routing_read!r} has no effect with routing 'none'; set "
                "routing to 'hierarchical', 'flat' or 'block', or leave routing_read 'additive'"
            )
        if self.routing in ("none", "flat") and not self.routing_summary_ffn:
            raise ValueError(
                f"routing_summary_ffn: False has no effect with routing {self.routing!r}, which "
                "has no block summaries; set routing to 'hierarchical' or 'block', or leave it True"
            )

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Names of one block's sublayers in order: "mixer_0", ..., and "ffn" or "ffn_0", ..."""
        mixers = [f"mixer_{index}" for index in range(len(self.block))]
        if self.ffn_after == "block":
            return (*mixers, "ffn")
        return tuple(name for index, mixer in enumerate(mixers) for name in (mixer, f"ffn_{index}"))

    def mixer_of(self, sublayer: str) -> str | None:
        """Returns the mixer of a sublayer of `sublayers`, or None for a feed-forward layer."""
        kind, _, index = sublayer.partition("_")
        return self.block[int(index)] if kind == "mixer" else None

    @property
    def gated_mixers(self) -> tuple[str, ...]:
        """Paths of the GDN-2 mixers in order of depth, e.g. "block_0/mixer_1"."""
        return tuple(
            f"block_{block}/{name}"
            for block in range(self.num_blocks)
            for name in self.sublayers
            if (self.mixer_of(name) or "").startswith("gdn2")
        )

    @property
    def sublayer_count(self) -> int:
        """Sublayers of the whole model."""
        return self.num_blocks * len(self.sublayers)

    @cached_property
    def depth_plan(self) -> DepthPlan:
        """Which sources each sublayer reads."""
        return plan_depth(self.routing, num_blocks=self.num_blocks, slots=len(self.sublayers))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its "/"-joined path; no array is made."""
        from atomic_lib.model.accounting import parameter_shapes

        return parameter_shapes(self)

    @property
    def parameter_counts(self) -> dict[str, int]:
        """Parameters of each group: "embedding", "muon", "adamw_matrices" and "vectors"."""
        from atomic_lib.model.accounting import parameter_counts

        return parameter_counts(self)

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        return sum(self.parameter_counts.values())

    def flops_per_token(self, sequence_length: int, *, training: bool = True) -> float:
        """Returns FLOPs a token (see `accounting.py`); training counts three forward passes."""
        from atomic_lib.model.accounting import forward_flops_per_token

        return forward_flops_per_token(self, sequence_length) * (3 if training else 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary; `from_dict` is its inverse."""
        return {**asdict(self), "block": list(self.block)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Builds a configuration, refusing unknown names (ValueError with the nearest one)."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"model.{key}: unknown name{_nearest(key, known)}")
        return cls(**values)


def _nearest(name: object, valid: "tuple[str, ...] | list[str]") -> str:
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
