# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests of this folder, and how two arrays are compared."""

import jax
import jax.numpy as jnp
import numpy as np

from atomic_lib.model import Execution, ModelConfig

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


def _lively(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.normal(size=shape)
    if len(shape) == 2:
        return noise if name.endswith("table") else noise / shape[0] ** 0.5
    if name.endswith("scale"):
        return 1 + 0.2 * noise
    if name.endswith("A_log"):
        return 1 + 0.5 * noise
    return 0.3 * noise - (3 if name.endswith("dt_bias") else 0)


def lively_parameters(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Parameters of trained sizes: no scale is 1, no query and no bias is 0.

    Drawn by numpy, because compiling JAX's generator for every shape takes most of a test's time.
    """
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(_lively(rng, name, shape), jnp.float32)
        for name, shape in config.parameter_shapes.items()
    }


def random_tokens(config: ModelConfig, batch: int, length: int, seed: int = 7) -> jax.Array:
    """Tokens int32 [batch, length]."""
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=(batch, length))
    return jnp.asarray(tokens, jnp.int32)


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
