# SPDX-License-Identifier: Apache-2.0
"""What a program needs of a chip's memory, and what to change when it needs too much."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atomic_lib.aot.target import Target
from atomic_lib.config import TrainConfig

GIB = 2**30
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([BKMGT]?)i?B?"
# The compiler's two ways of saying that a program does not fit.
_OVER = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


@dataclass(frozen=True, kw_only=True)
class ChipMemory:
    """Bytes of one chip that a compiled program holds at its peak, by kind.

    The sum is the compiler's: arguments, results that do not reuse an argument's memory,
    temporaries at their largest, code. batch_and_padding is what the arguments take beyond
    parameters and optimiser state: tokens, scalars, and the padding of tiled layouts.
    """

    parameters: int
    optimizer: int
    batch_and_padding: int
    outputs: int
    temporaries: int
    code: int

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "ChipMemory":
        """From what the worker wrote about a program."""
        memory = facts["memory"]
        state = facts["parameter_bytes"] + facts["optimizer_bytes"]
        return cls(
            parameters=facts["parameter_bytes"],
            optimizer=facts["optimizer_bytes"],
            batch_and_padding=memory["argument"] - state,
            outputs=memory["output"] - memory["alias"],
            temporaries=memory["temp"],
            code=memory["generated_code"],
        )

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A limit that the run breaks, and what would help."""

    what: str
    needed: float
    allowed: float
    unit: str
    advice: tuple[str, ...]

    def __str__(self) -> str:
        over = self.needed - self.allowed
        text = (
            f"{self.what}: {self.needed:.2f} {self.unit} where {self.allowed:.2f} are allowed, "
            f"{over:.2f} over"
        )
        return "; ".join([text, *self.advice])


def compile_overflow(message: str) -> tuple[int, int] | None:
    """(bytes needed, bytes there) from the compiler's out-of-memory message; None for another."""
    for pattern in _OVER:
        match = pattern.search(message)
        if match:
            needed, unit, there, there_unit = match.groups()
            return round(float(needed) * _UNITS[unit]), round(float(there) * _UNITS[there_unit])
    return None


def state_floor_bytes(config: TrainConfig) -> int:
    """Bytes a chip needs at least: float32 parameters, moments and gradients.

    "vectors" are counted as if they were sharded too; they are less than a thousandth.
    """
    counts = config.model_config.parameter_counts
    total = sum(counts.values())
    one_moment = counts["muon"] if config.optimizer == "muon_adamw" else 0
    moments = 2 * (total - one_moment) + one_moment
    return 4 * (2 * total + moments) // config.fsdp


def memory_problem(
    config: TrainConfig, target: Target, needed: int, memory: ChipMemory | None
) -> Problem | None:
    """The problem of a program that needs `needed` bytes a chip, None if they are there."""
    if needed <= target.hbm_limit_bytes:
        return None
    return Problem(
        what=f"memory of a {target.chip.name} chip",
        needed=needed / GIB,
        allowed=target.hbm_limit_bytes / GIB,
        unit="GiB",
        advice=tuple(_advice(config, target, needed, memory)),
    )


def _advice(
    config: TrainConfig, target: Target, needed: int, memory: ChipMemory | None
) -> list[str]:
    """What would bring it under the limit, by proportion; each line says what it should save."""
    over = needed - target.hbm_limit_bytes
    floor = state_floor_bytes(config)
    activations = (memory.temporaries if memory else needed - floor) - _gradient_bytes(config)
    lines = []
    local = config.batch_size // (target.chips * config.accumulate_steps)
    for factor in range(2, local + 1):
        if local % factor == 0:
            # Slices share their activations, but the running sum of gradients comes on top.
            saved = activations * (1 - 1 / factor)
            saved -= _gradient_bytes(config) if config.accumulate_steps == 1 else 0
            if saved >= over:
                lines.append(
                    f"accumulate_steps {config.accumulate_steps * factor} should save about "
                    f"{saved / GIB:.1f} GiB (the same batch in smaller slices)"
                )
                break
    if config.fsdp < target.chips:
        saved = floor * (1 - config.fsdp / target.chips)
        enough = "" if saved >= over else ", not enough alone"
        lines.append(
            f"fsdp {target.chips} should save about {saved / GIB:.1f} GiB of parameters, moments "
            f"and gradients{enough}"
        )
    if not lines:
        lines.append("a smaller preset (NAME@SIZE) or more chips is needed")
    return lines


def _gradient_bytes(config: TrainConfig) -> int:
    return 4 * config.model_config.parameter_count // config.fsdp
