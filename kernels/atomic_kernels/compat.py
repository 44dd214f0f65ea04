# SPDX-License-Identifier: Apache-2.0
"""The names and argument order of the package atomic_ops on top of `gdn2`.

    from atomic_kernels.compat import gdn2_forward_trainable   # was: from atomic_ops import ...

Two differences are meant. Any length and head size works: blocks need not divide it. And nothing
is clipped, damped or replaced: a `KernelConfig` that asks for it raises a UserWarning and the
exact result is computed.
"""

import dataclasses
import warnings

import jax
from jax import Array

from atomic_kernels.gdn2 import gdn2
from atomic_kernels.gdn2.checks import CHUNK_SIZES

_MEBIBYTE = 1024 * 1024
# Kept for the backward with chunks of 64 rows; beyond this, chunks of 128 halve the states. The
# chip that the presets are named after has 16 GiB.
_SMALL_CHUNKS_MEBIBYTES = 2500


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The settings of atomic_ops. Here `bc` becomes the chunk size; the others change nothing.

    bt: rows of a block, 2 * bc there. mb: rows of its solver's blocks. clip: bound put on every
    intermediate there. wy_eps: damping of its triangular solve.
    """

    bt: int = 256
    bc: int = 128
    mb: int = 16
    clip: float = 1e4
    wy_eps: float = 0.0

    def __post_init__(self):
        if self.bt != 2 * self.bc:
            raise ValueError(f"bt must be 2 * bc = {2 * self.bc}, got {self.bt}.")
        if self.mb < 1 or self.bc % self.mb:
            raise ValueError(f"mb must divide bc = {self.bc}, got {self.mb}.")
        if self.bc not in CHUNK_SIZES:
            raise ValueError(f"bc must be one of {CHUNK_SIZES}, got {self.bc}.")


# The values of atomic_ops 0.2.0.
KAGGLE_SMALL = KernelConfig(bt=128, bc=64, mb=16, clip=1e4, wy_eps=1e-3)
KAGGLE_MEDIUM = KernelConfig(bt=256, bc=128, mb=16, clip=1e4, wy_eps=1e-3)
KAGGLE_LARGE = KernelConfig(bt=256, bc=128, mb=16, clip=5e3, wy_eps=1e-3)
DEFAULT_CONFIG = KAGGLE_MEDIUM


def gdn2_forward_trainable(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    b: Array,
    g: Array,
    scale: float,
    h0: Array | None = None,
    config: KernelConfig | None = None,
) -> tuple[Array, Array]:
    """o and the last state, differentiable; note the order w, b, g.

    q, k, b, g [B, T, H, K]; v, w [B, T, Hv, V]; h0 [B, Hv, K, V] float32. Backend "auto".
    Raises ValueError as `gdn2` does; warns where `config` asks for clipping or damping.
    """
    chunk_size = None
    if config is not None:
        _warn_of_ignored(config)
        # The TPU kernels have one chunk size, their own; elsewhere bc is the caller's choice.
        chunk_size = None if is_tpu_available() else config.bc
    return gdn2(q, k, v, g, b, w, scale=scale, initial_state=h0, chunk_size=chunk_size)


gdn2_forward = gdn2_forward_trainable


def gdn2_token_serial_reference(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float,
    h0: Array | None = None,
) -> tuple[Array, Array]:
    """o and the last state token by token; the order is g, b, w here."""
    return gdn2(q, k, v, g, b, w, scale=scale, initial_state=h0, backend="reference")


def gdn2_chunked_wy_reference(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float,
    chunk_size: int,
    h0: Array | None = None,
    wy_eps: float = 0.0,
) -> tuple[Array, Array]:
    """o and the last state by chunks of `chunk_size` in XLA; the order is g, b, w here.

    chunk_size is a power of two from 16 to 256. Warns where wy_eps asks for damping.
    """
    if wy_eps:
        _warn(f"wy_eps={wy_eps:g} is ignored: the solve is exact, not damped")
    return gdn2(
        q, k, v, g, b, w, scale=scale, initial_state=h0, chunk_size=chunk_size, backend="xla"
    )


def is_tpu_available() -> bool:
    """Whether JAX sees a TPU."""
    return any(device.platform == "tpu" for device in jax.devices())


def estimate_memory(
    batch: int,
    seq_len: int,
    heads: int,
    d_head: int = 128,
    bt: int = 256,
    bytes_per_param: int = 4,
) -> float:
    """MiB that a forward keeps for its backward on one device, inputs not counted.

    For chunks of bt / 2 rows: a state d_head^2 and an inverse (bt / 2)^2 a chunk and head, each
    number of `bytes_per_param` bytes.
    """
    rows = bt // 2
    chunks = -(-seq_len // rows)
    numbers = batch * heads * chunks * (d_head * d_head + rows * rows)
    return numbers * bytes_per_param / _MEBIBYTE


def get_recommended_config(batch: int, seq_len: int, heads: int, d_head: int = 128) -> KernelConfig:
    """KAGGLE_SMALL (chunks of 64), or KAGGLE_MEDIUM where its larger chunks save memory.

    KAGGLE_LARGE differs from it in the clipping bound only, which means nothing here.
    """
    kept = estimate_memory(batch, seq_len, heads, d_head, bt=KAGGLE_SMALL.bt)
    return KAGGLE_MEDIUM if kept > _SMALL_CHUNKS_MEBIBYTES else KAGGLE_SMALL


def _warn_of_ignored(config: KernelConfig) -> None:
    if config.clip != float("inf"):
        _warn(f"clip={config.clip:g} is ignored: nothing is clipped, an overflow stays visible")
    if config.wy_eps:
        _warn(f"wy_eps={config.wy_eps:g} is ignored: the solve is exact, not damped")


def _warn(what: str) -> None:
    warnings.warn(f"{what}.", UserWarning, stacklevel=4)


__all__ = [
    "DEFAULT_CONFIG",
    "KAGGLE_LARGE",
    "KAGGLE_MEDIUM",
    "KAGGLE_SMALL",
    "KernelConfig",
    "estimate_memory",
    "gdn2_chunked_wy_reference",
    "gdn2_forward",
    "gdn2_forward_trainable",
    "gdn2_token_serial_reference",
    "get_recommended_config",
    "is_tpu_available",
]
