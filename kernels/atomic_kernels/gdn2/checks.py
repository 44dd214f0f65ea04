# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the public functions: every message names the argument, what came,
what is allowed, and what to do. Shapes and dtypes are checked always; values (g <= 0, segment_ids
not decreasing) when they are known, that is outside `jax.jit` and `jax.grad`."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.tpu import InterpretParams

BACKENDS = ("auto", "reference", "xla", "tpu")
PRECISIONS = ("bf16", "bf16x3", "f32")
CHUNK_SIZES = (16, 32, 64, 128, 256)
_NAMES = ("q", "k", "v", "g", "b", "w")


def check_choices(
    backend: str, precision: str | None, chunk_size: int | None, interpret: bool | InterpretParams
) -> None:
    """Refuses unknown names and chunk sizes that are no power of two from 16 to 256."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"precision must be one of {PRECISIONS}, or None to follow the inputs' dtype, "
            f"got {precision!r}."
        )
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size must be one of {CHUNK_SIZES}, or None for the backend's own, "
            f"got {chunk_size!r}."
        )
    if interpret and backend != "tpu":
        raise ValueError(
            f"interpret=True runs the TPU kernel's body on the CPU and needs backend='tpu', "
            f"got backend={backend!r}."
        )


def check_inputs(inputs: tuple[Array, ...], *, sequence: bool, allow_float64: bool) -> None:
    """q, k, g, b [B, T, H, K] and v, w [B, T, Hv, V], without T unless `sequence`."""
    axes = "B, T, H, " if sequence else "B, H, "
    by_name = dict(zip(_NAMES, inputs, strict=True))
    for name, x in by_name.items():
        _check_dtype(name, x, allow_float64)
        if x.ndim != (4 if sequence else 3):
            last = "V] with Hv heads" if name in "vw" else "K]"
            raise ValueError(f"{name} must be [{axes}{last}, got shape {x.shape}.")
        if 0 in x.shape:
            raise ValueError(f"{name} has an empty axis: shape {x.shape}. Every axis must be >= 1.")
    q, v = by_name["q"], by_name["v"]
    for name in ("k", "g", "b"):
        if by_name[name].shape != q.shape:
            raise ValueError(
                f"{name} must have q's shape {q.shape} [{axes}K], got {by_name[name].shape}."
            )
    if v.shape[:-2] != q.shape[:-2]:
        raise ValueError(
            f"v must have q's leading axes {q.shape[:-2]} ({axes[:-5]}), got shape {v.shape}."
        )
    if by_name["w"].shape != v.shape:
        raise ValueError(f"w must have v's shape {v.shape}, got {by_name['w'].shape}.")
    if v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"v has {v.shape[-2]} heads, which is no multiple of q's {q.shape[-2]}: value head h "
            "reads key head h // (Hv / H)."
        )


def check_state(name: str, state: Array, inputs: tuple[Array, ...], *, allow_float64: bool) -> None:
    """The state must be float32 [B, Hv, K, V]."""
    q, v = inputs[0], inputs[2]
    want = (q.shape[0], v.shape[-2], q.shape[-1], v.shape[-1])
    allowed = (jnp.float32, jnp.float64) if allow_float64 else (jnp.float32,)
    if state.shape != want or state.dtype not in allowed:
        raise ValueError(
            f"{name} must be float32 {want} [B, Hv, K, V], got {state.dtype} {state.shape}: "
            "a bfloat16 state drifts. Cast it with .astype(jnp.float32)."
        )


def check_segment_ids(segment_ids: Array, inputs: tuple[Array, ...]) -> None:
    """Integers [B, T] that do not decrease along T."""
    want = inputs[0].shape[:2]
    if segment_ids.shape != want:
        raise ValueError(f"segment_ids must be {want} [B, T], got shape {segment_ids.shape}.")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be int32, got {segment_ids.dtype}.")
    if isinstance(segment_ids, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        decreasing = (segment_ids[:, 1:] < segment_ids[:, :-1]).any(1)  # [B]
        if decreasing.any():
            raise ValueError(
                f"segment_ids must not decrease along T; row {int(jnp.argmax(decreasing))} does. "
                "Number the segments in the order in which they stand."
            )


def check_decay(g: Array) -> None:
    """g is a log decay: at most 0 (NaN passes, so that a fault upstream stays visible)."""
    if isinstance(g, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        if (g > 0).any():
            raise ValueError(
                f"g must be <= 0 (log decay in nats), got a maximum of {float(jnp.nanmax(g)):.6g}. "
                "Raw projections go to gdn2_from_projections, or through decay_gate first."
            )


def check_gate_parameters(
    A_log: Array | None, dt_bias: Array | None, lower_bound: float | None, q: Array
) -> None:
    """A_log [H], dt_bias [H, K], lower_bound a finite number < 0."""
    for name, x, want, axes in (
        ("A_log", A_log, q.shape[2:3], "[H]"),
        ("dt_bias", dt_bias, q.shape[2:], "[H, K]"),
    ):
        if x is None:
            continue
        _check_dtype(name, x, allow_float64=True)
        if x.shape != want:
            raise ValueError(f"{name} must be {want} {axes}, got shape {x.shape}.")
    if lower_bound is not None and not -float("inf") < lower_bound < 0:
        raise ValueError(
            f"lower_bound must be a finite log decay < 0 in nats, got {lower_bound!r}."
        )


def _check_dtype(name: str, x: Array, allow_float64: bool) -> None:
    if x.dtype == jnp.float16:
        raise ValueError(
            f"{name} is float16, whose largest number is 65504 and whose smallest step near 0 is "
            "6e-8: states and decays leave that range. Use bfloat16 or float32."
        )
    if x.dtype == jnp.float64 and not allow_float64:
        raise ValueError(
            f"{name} is float64, which only backend='reference' computes in. Cast it to float32 "
            "or bfloat16, or ask for that backend."
        )
    if x.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"{name} must be bfloat16 or float32, got {x.dtype}.")
