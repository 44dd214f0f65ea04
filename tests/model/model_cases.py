# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests of this folder, and how two arrays are compared."""

import jax
import numpy as np

from atomic_lib.model import (
    Execution,
    ModelConfig,
    bind_parameters,
    init_parameters,
    model_graph,
)

# The recurrence token by token: it compiles in a tenth of the chunked form's time, and these tests
# are about what surrounds it. Those that need the chunked form ask for it.
FLOAT32 = Execution(compute_dtype="float32", gdn2_backend="reference")
CHUNKED = Execution(compute_dtype="float32", gdn2_backend="xla")

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_size": 48,
    "num_heads": 2,
    "head_dim": 16,
    "conv_taps": 4,
    "gate_rank": 8,
    "attention_heads": 2,
    "attention_head_dim": 16,
    "attention_gate": True,
    "window_size": 24,
    "mla_latent_dim": 12,
    "mla_content_dim": 8,
    "mla_rotary_dim": 6,
    "mla_value_dim": 10,
}


def small_config(*block: str, **changes) -> ModelConfig:
    """One block of these mixers, width 32; `changes` replace fields."""
    return ModelConfig(**{**_SIZES, "num_blocks": 1, "block": block, **changes})


def lively_parameters(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Initial parameters moved by noise, so that no scale is 1 and no query or bias is 0."""
    params = init_parameters(config, seed)
    keys = jax.random.split(jax.random.key(seed + 1), len(params))
    return {
        name: value + 0.2 * jax.random.normal(key, value.shape) / max(1.0, value.shape[0] ** 0.5)
        if value.ndim == 2
        else value + 0.2 * jax.random.normal(key, value.shape)
        for key, (name, value) in zip(keys, params.items(), strict=True)
    }


def small_model(config: ModelConfig, execution: Execution = FLOAT32, seed: int = 0):
    """A model of `config` with lively parameters."""
    return bind_parameters(model_graph(config, execution), lively_parameters(config, seed))


def random_tokens(config: ModelConfig, batch: int, length: int, seed: int = 7) -> jax.Array:
    """Tokens int32 [batch, length]."""
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size)


def assert_close(name: str, found, wanted, *, limit: float) -> None:
    """Asserts shape, then finiteness, then |found - wanted| <= limit * max(1, max |wanted|)."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, f"{name}: shape {found.shape}, wanted {wanted.shape}"
    assert np.isfinite(found).all(), f"{name}: {np.sum(~np.isfinite(found))} values are not finite"
    if found.size == 0:
        return
    error = np.abs(found - wanted)
    worst = np.unravel_index(np.argmax(error), error.shape)
    bound = limit * max(1.0, float(np.abs(wanted).max()))
    assert error[worst] <= bound, (
        f"{name}: off by {error[worst]:.3g} at {tuple(map(int, worst))} (limit {bound:.3g}): "
        f"found {found[worst]:.9g}, wanted {wanted[worst]:.9g}"
    )


def as_float64(params) -> dict[str, np.ndarray]:
    """The parameters as float64 numpy arrays."""
    return {name: np.asarray(value, np.float64) for name, value in params.items()}
