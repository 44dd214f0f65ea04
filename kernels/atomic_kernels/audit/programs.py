# SPDX-License-Identifier: Apache-2.0
"""The programs whose schedules are compared: ours, and the same operation in peers' packages.

Every function returns (function, arguments), as `atomic_kernels.schedule.compile_schedule` wants
it. A forward program returns the outputs; a training program returns the gradients of a weighted
sum of the outputs for all six inputs, so it holds the forward and the backward kernel.

Peers, from the PyPI distribution atomic-ops 0.2.0, take heads of K = V only, float32, and whole
chunks. They clip and damp, so they compute a slightly different function; the comparison is of
schedules. Their argument order is q, k, v, w, b, g.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Program = tuple[Callable[..., Any], tuple[Any, ...]]

INPUTS = ("q", "k", "v", "g", "b", "w")


def input_shapes(
    B: int, T: int, H: int, K: int, V: int, *, value_heads: int, dtype: str, decay_dtype: str
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k [B, T, H, K], v [B, T, Hv, V], g, b [B, T, H, K], w [B, T, Hv, V]."""
    keys = jax.ShapeDtypeStruct((B, T, H, K), jnp.dtype(dtype))
    values = jax.ShapeDtypeStruct((B, T, value_heads, V), jnp.dtype(dtype))
    decay = jax.ShapeDtypeStruct((B, T, H, K), jnp.dtype(decay_dtype))
    return keys, keys, values, decay, keys, values


def forward(
    *,
    B: int = 8,
    T: int = 4096,
    H: int = 6,
    K: int = 128,
    V: int = 128,
    value_heads: int | None = None,
    dtype: str = "bfloat16",
    decay_dtype: str = "float32",
    projections: bool = False,
    decay_parameters: bool = False,
    backend: str = "tpu",
    **options: Any,
) -> Program:
    """Our forward: o and the final state. options are passed to the operation.

    With projections all arguments are raw, and decay_parameters appends A_log [H] and dt_bias
    [H, K].
    """
    operation = _operation(projections, backend, options)
    arguments = input_shapes(
        B, T, H, K, V, value_heads=value_heads or H, dtype=dtype, decay_dtype=decay_dtype
    )
    if decay_parameters:
        arguments += (jax.ShapeDtypeStruct((H,), jnp.float32),)
        arguments += (jax.ShapeDtypeStruct((H, K), jnp.float32),)
    return operation, arguments


def training(**shape_and_options: Any) -> Program:
    """Our forward and backward: gradients of sum(o * do) for every array argument.

    Takes what `forward` takes; the cotangent do has o's shape and dtype and is the last argument.
    """
    operation, arguments = forward(**shape_and_options)
    return _gradient(lambda *arrays: operation(*arrays)[0], arguments, arguments[2])


def norm_training(
    *, N: int = 8192, D: int = 1024, group: int = 1024, centred: bool = True, summands: int = 1
) -> Program:
    """Our norm forward and backward: its outputs, then the gradients of every array.

    summands: 1 (x), 2 (x + delta) or 3 (x + delta + read).
    """
    from atomic_kernels.norms import add_and_normalise, normalise

    rows = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((D,), jnp.float32)
    options = (group, centred, 1e-6)
    outputs = 1 if summands == 1 else 2

    def operation(*arrays: Any) -> tuple[Any, ...]:
        *terms, scale, bias = arrays
        if summands == 1:
            return (normalise(*terms, scale, bias, *options),)
        x, delta, *reads = terms
        return add_and_normalise(x, delta, *(reads or (None,)), scale, bias, *options)

    def program(*arrays: Any) -> Any:
        values, pullback = jax.vjp(operation, *arrays[:-outputs])
        return *values, *pullback(arrays[-outputs:])

    return program, (*[rows] * summands, vector, vector, *[rows] * outputs)


def decode_step(
    *, B: int = 64, H: int = 6, K: int = 128, V: int = 128, dtype: str = "bfloat16"
) -> Program:
    """Our one-token step: state [B, H, K, V] and a token's inputs to o and the next state."""
    from atomic_kernels.gdn2 import gdn2_step

    state = jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)
    keys = jax.ShapeDtypeStruct((B, H, K), jnp.dtype(dtype))
    values = jax.ShapeDtypeStruct((B, H, V), jnp.dtype(dtype))
    decay = jax.ShapeDtypeStruct((B, H, K), jnp.float32)
    step = jax.jit(gdn2_step, donate_argnums=0)
    return step, (state, keys, keys, values, decay, keys, values)


def _operation(projections: bool, backend: str, options: dict[str, Any]) -> Callable[..., Any]:
    from atomic_kernels.gdn2 import gdn2, gdn2_from_projections

    if not projections:
        return lambda *arrays: gdn2(*arrays, backend=backend, **options)

    def from_projections(*arrays: Any) -> Any:
        q, k, v, g, b, w, *parameters = arrays
        named = dict(zip(("A_log", "dt_bias"), parameters, strict=False))
        return gdn2_from_projections(q, k, v, g, b, w, backend=backend, **named, **options)

    return from_projections


def _gradient(
    output: Callable[..., Any], arguments: tuple[Any, ...], cotangent: jax.ShapeDtypeStruct
) -> Program:
    """The program (arguments, cotangent) -> the gradients of sum(output * cotangent)."""

    def program(*arrays: Any) -> Any:
        *inputs, weight = arrays
        _, pullback = jax.vjp(output, *inputs)
        return pullback(weight)

    return program, (*arguments, cotangent)


def atomic_gdn2_forward(*, B: int = 8, T: int = 4096, H: int = 6, K: int = 128) -> Program:
    """The newer peer, package atomic_gdn2: chunks of 128, head-major [B, H, T, K] float32."""
    require_peer("atomic_gdn2")
    from atomic_gdn2 import make_blr_trainable, make_cfg

    call = make_blr_trainable(make_cfg(bs2=32, interpret=False), K**-0.5)
    return call, (jax.ShapeDtypeStruct((B, H, T, K), jnp.float32),) * 6


def atomic_gdn2_training(**shape: Any) -> Program:
    """Forward and backward of `atomic_gdn2_forward`."""
    call, arguments = atomic_gdn2_forward(**shape)
    return _gradient(lambda *arrays: call(*arrays)[0], arguments, arguments[0])


def atomic_ops_forward(*, B: int = 8, T: int = 4096, H: int = 6, K: int = 128) -> Program:
    """The older peer, package atomic_ops, at its default tiles: [B, T, H, K] float32."""
    require_peer("atomic_ops")
    from atomic_ops import gdn2_pallas_forward_trainable

    arguments = (jax.ShapeDtypeStruct((B, T, H, K), jnp.float32),) * 6

    def call(q: Any, k: Any, v: Any, w: Any, b: Any, g: Any) -> Any:
        return gdn2_pallas_forward_trainable(q, k, v, w, b, g, K**-0.5)

    return call, arguments


def atomic_ops_training(**shape: Any) -> Program:
    """Forward and backward of `atomic_ops_forward`."""
    call, arguments = atomic_ops_forward(**shape)
    return _gradient(lambda *arrays: call(*arrays)[0], arguments, arguments[0])


def require_peer(package: str) -> None:
    """Raises RuntimeError with the command that installs the peers where `package` is missing."""
    if importlib.util.find_spec(package) is None:
        raise RuntimeError(
            f"the peer package {package} is not installed: "
            f"`{sys.executable} -m pip install --no-deps atomic-ops==0.2.0` brings it."
        )
