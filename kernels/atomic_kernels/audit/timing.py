# SPDX-License-Identifier: Apache-2.0
"""Measured times on the device that is there: medians and spread, never a best case.

A time here is a wall-clock measurement of a compiled program whose results are awaited; it holds
the dispatch (some 0.1 ms), which the static schedules do not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from atomic_kernels.audit.programs import Program, forward, training


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each timed call, in order, and where they ran."""

    device: str
    milliseconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median call."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """The quarter and three-quarter points, by linear interpolation."""
        first, third = np.percentile(self.milliseconds, [25, 75])
        return float(first), float(third)


def time_program(
    program: Program, *, repeats: int, warmups: int = 2, clock: Callable[[], float] | None = None
) -> Timing:
    """Times a program of `audit.programs` on JAX's default device, on random inputs.

    The program is compiled and run `warmups` times first, untimed. Inputs are made once, from the
    contract's ranges: decay below zero, gates in [0, 1]. clock returns seconds. Raises ValueError
    for fewer than one repeat, and whatever the program raises.
    """
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} timed calls; at least 1 is needed")
    clock = clock or time.perf_counter
    function, shapes = program
    arguments = jax.device_put(random_arguments(shapes))
    compiled = jax.jit(function).lower(*arguments).compile()
    for _ in range(warmups):
        jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        started = clock()
        jax.block_until_ready(compiled(*arguments))
        times.append(1e3 * (clock() - started))
    device = jax.devices()[0]
    return Timing(device=f"{device.device_kind} ({device.platform})", milliseconds=tuple(times))


def random_arguments(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """q, k, v, g, b, w and what follows them: g mild decay below zero, b and w in [0, 1]."""
    random = np.random.default_rng(0)
    arrays = []
    for position, shape in enumerate(shapes):
        array = random.standard_normal(shape.shape)
        if position in (0, 1):
            array /= math.sqrt(shape.shape[-1])
        elif position == 3:
            array = -np.exp(array - 3.0)
        elif position in (4, 5):
            array = 1.0 / (1.0 + np.exp(-array))
        arrays.append(array.astype(shape.dtype))
    return arrays


def timing_rows(
    *,
    B: int,
    T: int,
    H: int,
    K: int,
    repeats: int,
    dtype: str = "bfloat16",
    backends: Sequence[str] = ("tpu", "xla"),
) -> Iterator[dict[str, Any]]:
    """Rows of measured forward and forward-and-backward times of each backend that can run here.

    The TPU kernels need a TPU: elsewhere their rows say so under "skipped" and hold no time.
    """
    platform = jax.default_backend()
    for backend in backends:
        for direction, factory in (("forward", forward), ("training", training)):
            row: dict[str, Any] = {
                "backend": backend,
                "direction": direction,
                "dtype": dtype,
                **{"B": B, "T": T, "H": H, "K": K},
            }
            if backend == "tpu" and platform != "tpu":
                yield {**row, "skipped": f"needs a TPU; this is {platform}"}
                continue
            program = factory(B=B, T=T, H=H, K=K, V=K, dtype=dtype, backend=backend)
            timing = time_program(program, repeats=repeats)
            first, third = timing.quartiles_ms
            yield {
                **row,
                "device": timing.device,
                "median ms": timing.median_ms,
                "first quartile ms": first,
                "third quartile ms": third,
                "repeats": repeats,
                "tokens a second": 1e3 * B * T / timing.median_ms,
                "skipped": None,
            }
