# SPDX-License-Identifier: Apache-2.0
"""Facts about the TPU chips whose schedules can be read, and how to name them to libtpu.

clock_hertz is the rate at which one VLIW bundle issues; peak_flops counts bf16 multiply-adds as
two; hbm_bytes_per_second is the published peak. The peaks agree with the units:
    peak_flops = 2 * units * side**2 * rows a cycle * clock_hertz
    v5e          2 * 4 * 128**2 * 1 * 1.5e9  = 1.97e14
    v6e          2 * 2 * 256**2 * 2 * 1.75e9 = 9.18e14
Source: Google Cloud TPU system architecture pages (peaks, HBM); units and rows a cycle from the
chips' own schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation: its clock, its peaks, and the name libtpu wants for it."""

    name: str
    clock_hertz: float
    peak_flops: float
    hbm_bytes_per_second: float
    hbm_bytes: int
    accelerator_type: str
    # Cycles that one matrix product instruction holds its unit, by operand format: the least
    # distance of two on one unit in schedules that keep the waits. An instruction takes 16 rows
    # of a packed bf16 operand or 8 of an f32 one.
    matmul_hold_cycles: Mapping[str, int] = field(repr=False)

    def seconds(self, cycles: float) -> float:
        """Time of `cycles` bundles at the chip's clock, in seconds."""
        return cycles / self.clock_hertz


CHIPS = {
    "v5e": Chip(
        name="v5e",
        clock_hertz=1.5e9,
        peak_flops=197e12,
        hbm_bytes_per_second=819e9,
        hbm_bytes=16 * 2**30,
        accelerator_type="v5litepod-8",
        matmul_hold_cycles=MappingProxyType({"bf16": 16, "f32": 8, "lmr": 8}),
    ),
    "v6e": Chip(
        name="v6e",
        clock_hertz=1.75e9,
        peak_flops=918e12,
        hbm_bytes_per_second=1640e9,
        hbm_bytes=32 * 2**30,
        accelerator_type="v6e-8",
        matmul_hold_cycles=MappingProxyType({"bf16": 8, "f32": 4}),
    ),
}


def chip_for_topology(topology: str) -> Chip:
    """The chip of a topology name such as "v5e:2x4".

    Raises ValueError naming the chips known here when the part before ":" is another.
    """
    name, separator, shape = topology.partition(":")
    if name not in CHIPS or not separator or not shape:
        raise ValueError(
            f"topology: {topology!r} is not CHIP:SHAPE with CHIP one of {sorted(CHIPS)}: "
            'write for example "v5e:2x4" or "v6e:2x4".'
        )
    return CHIPS[name]
