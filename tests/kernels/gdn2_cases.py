# SPDX-License-Identifier: Apache-2.0
"""What the tests of `gdn2` share: inputs, orders of a chunk's rows, and a comparison that names
what differs."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from atomic_kernels.gdn2 import gdn2

NAMES = ("q", "k", "v", "g", "b", "w", "initial_state")


def small_inputs(
    *,
    length: int,
    batch: int = 1,
    heads: int = 1,
    value_heads: int | None = None,
    key_size: int = 16,
    value_size: int = 16,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """The seven arrays of a call in float32: unit keys, mild decay, gates in (0, 1)."""
    random = np.random.default_rng(seed)
    by_key = (batch, length, heads, key_size)
    by_value = (batch, length, value_heads or heads, value_size)
    k = random.standard_normal(by_key)
    arrays = {
        "q": random.standard_normal(by_key),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal(by_value),
        "g": -np.exp(random.normal(-2.0, 1.0, by_key)),
        "b": random.uniform(size=by_key),
        "w": random.uniform(size=by_value),
        "initial_state": random.standard_normal(
            (batch, value_heads or heads, key_size, value_size)
        ),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


@functools.cache
def _compiled(options: tuple) -> jax.stages.Wrapped:
    def run(arrays, segment_ids):
        inputs = [arrays[name] for name in NAMES[:6]]
        return gdn2(
            *inputs,
            initial_state=arrays.get("initial_state"),
            segment_ids=segment_ids,
            **dict(options),
        )

    # Equal bits of programs of unequal shapes: the quicker generator of tests/conftest.py contracts
    # multiplications and additions by shape.
    emitters = "xla_cpu_use_fusion_emitters"
    known = f"--{emitters}" in os.environ["XLA_FLAGS"]
    return jax.jit(run, compiler_options={emitters: True} if known else None)


def run(arrays: dict[str, np.ndarray], segment_ids=None, **options) -> tuple:
    """gdn2 on named arrays; one compiled program a set of options and shapes."""
    options.setdefault("backend", "xla")
    return _compiled(tuple(sorted(options.items())))(arrays, segment_ids)


def by_steps(x: np.ndarray, width: int) -> np.ndarray:
    """Rows in order -> rows by steps of `width` runs, as `levels` has them."""
    return x.reshape(width, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)


def in_order(x: np.ndarray, width: int) -> np.ndarray:
    """The reverse of `by_steps`."""
    return x.reshape(-1, width, x.shape[1]).swapaxes(0, 1).reshape(x.shape)


def log_decays(kind: str, length: int, size: int) -> np.ndarray:
    """[length, size] float64 nats: "mild", "spikes" of -1736 every 37 tokens among them, "zero"."""
    g = -np.exp(np.random.default_rng(3).standard_normal((length, size)) - 2.0)
    if kind == "spikes":
        g[::37] = -1736.0
    if kind == "zero":
        g[:] = 0.0
    return g


def assert_close(name: str, got, want, *, limit: float) -> None:
    """Shape, then finite, then relative RMS; the message holds the worst place."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.isfinite(got).all(), f"{name}: {np.sum(~np.isfinite(got))} values are not finite"
    size = np.sqrt(np.mean(np.square(want)))
    error = np.sqrt(np.mean(np.square(got - want))) / (size or 1.0)
    worst = np.unravel_index(np.argmax(np.abs(got - want)), got.shape)
    assert error <= limit, (
        f"{name}: relative RMS {error:.2e} > {limit:.0e}; worst at {worst}: "
        f"{got[worst]} against {want[worst]}"
    )


def assert_same_bits(name: str, got, want) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    differs = got.view(np.uint32) != want.view(np.uint32)
    assert not differs.any(), (
        f"{name}: {differs.sum()} values differ, first {np.argwhere(differs)[0]}"
    )


def as_float64(arrays: dict[str, np.ndarray]) -> dict:
    """Under jax.enable_x64(True): the arrays as float64."""
    return {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
