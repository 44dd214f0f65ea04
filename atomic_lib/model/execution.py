# SPDX-License-Identifier: Apache-2.0
"""How a model is computed, as opposed to what it is: dtype, kernels, what the backward recomputes.

Two executions of one `ModelConfig` share every parameter, so a model trained in bfloat16 can be
evaluated in float32 by building it again with another `Execution`. Free of JAX.
"""

from dataclasses import dataclass

COMPUTE_DTYPES = ("bfloat16", "float32")
GDN2_BACKENDS = ("auto", "xla", "reference", "tpu")
ATTENTION_IMPLEMENTATIONS = ("auto", "chunked", "dot_product", "splash")
DEPTH_ROUTINGS = ("xla", "tpu")
NORMS = ("xla", "tpu")
REMATS = ("none", "save_dots", "save_nothing")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Choices that change speed, memory and rounding, never the function or its parameters."""

    compute_dtype: str = "bfloat16"  # of activations and projections; parameters are float32
    gdn2_backend: str = "auto"  # passed to atomic_kernels.gdn2
    attention: str = "auto"  # see atomic_lib.model.causal_attention
    depth_routing: str = "xla"  # "tpu" takes the kernels of atomic_kernels.depth_routing
    norms: str = "xla"  # "tpu" takes the kernels of atomic_kernels.norms
    # What each sublayer keeps for the backward pass: all ("none" recomputed), the results of
    # matrix products, or its input only.
    remat: str = "none"

    def __post_init__(self):
        for key, allowed in (
            ("compute_dtype", COMPUTE_DTYPES),
            ("gdn2_backend", GDN2_BACKENDS),
            ("attention", ATTENTION_IMPLEMENTATIONS),
            ("depth_routing", DEPTH_ROUTINGS),
            ("norms", NORMS),
            ("remat", REMATS),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key}: {value!r} is not allowed; choose one of {allowed}")


DEFAULT_EXECUTION = Execution()
