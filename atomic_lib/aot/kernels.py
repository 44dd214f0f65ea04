# SPDX-License-Identifier: Apache-2.0
"""The static schedules of a program's Pallas kernels, each compiled by itself.

The schedule texts of a whole model are gigabytes. So each distinct kernel is taken out of the
compiled program (its code stands in the instruction, its operands' shapes beside it), put into a
program of its own with `jax.ffi.ffi_call`, and compiled again with the texts kept.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_kernels.schedule import compile_schedule
from atomic_kernels.schedule.hlo import HloModule, Instruction

PALLAS_TARGET = "tpu_custom_call"
# Names in HLO -> numpy; what a Pallas kernel can take.
_DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "s32": "int32", "u32": "uint32", "s16": "int16",
    "u16": "uint16", "s8": "int8", "u8": "uint8", "pred": "bool",
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One distinct kernel: its code and configuration as the compiler was given them."""

    key: str
    name: str
    configuration: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape)
    results: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class KernelSchedule:
    """What the schedule of one kernel says; cycles are bundles times trips, stalls not counted."""

    key: str
    name: str
    cycles: int
    hbm_bytes: int
    vmem_bytes: int | None


def _arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (_DTYPES[kind], tuple(int(size) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
        if kind in _DTYPES
    )


def _configuration(instruction: Instruction) -> str | None:
    """The JSON of a Pallas call's backend_config that holds its code, or None."""
    if instruction.opcode != "custom-call":
        return None
    if instruction.attribute(r'custom_call_target="([^"]*)"') != PALLAS_TARGET:
        return None
    _, found, rest = instruction.attributes.partition("backend_config=")
    if not found:
        raise ValueError(f"kernel %{instruction.name}: no backend_config, so its code is unknown")
    whole, _ = json.JSONDecoder().raw_decode(rest)
    return json.dumps({"custom_call_config": whole["custom_call_config"]}, sort_keys=True)


def kernel_key(instruction: Instruction) -> str | None:
    """A name for the kernel that an instruction runs, equal for equal code; None if none."""
    configuration = _configuration(instruction)
    if configuration is None:
        return None
    shapes = re.sub(r"\{[^{}]*\}", "", instruction.shape)
    return hashlib.sha256(f"{configuration}{shapes}".encode()).hexdigest()[:16]


def distinct_kernels(modules: Iterable[HloModule]) -> tuple[Kernel, ...]:
    """Every different Pallas kernel of the programs, in order of appearance."""
    found: dict[str, Kernel] = {}
    for module in modules:
        for item in module.work():
            instruction = item.instruction
            key = kernel_key(instruction)
            if key is None or key in found:
                continue
            layouts = instruction.attribute(
                r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}"
            )
            found[key] = Kernel(
                key=key,
                name=re.sub(r"(\.\d+)+$", "", instruction.name),
                configuration=_configuration(instruction) or "",
                operands=_arrays(layouts or ""),
                results=_arrays(instruction.shape),
            )
    return tuple(found.values())


def kernel_program(path: str, key: str) -> tuple[Any, tuple[Any, ...]]:
    """The function of one kernel of `save_kernels`' file and its arguments' shapes.

    `compile_schedule` calls it in the subprocess that compiles.
    """
    import jax

    kernel = json.loads(Path(path).read_text())[key]
    shapes = {
        side: tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for dtype, shape in kernel[side])
        for side in ("operands", "results")
    }

    def run(*operands):
        return jax.ffi.ffi_call(
            PALLAS_TARGET,
            shapes["results"],
            custom_call_api_version=1,
            legacy_backend_config=kernel["configuration"],
        )(*operands)

    return run, shapes["operands"]


def save_kernels(kernels: Iterable[Kernel], path: Path) -> None:
    """Writes the kernels as JSON for `kernel_program`."""
    path.write_text(json.dumps({kernel.key: kernel.__dict__ for kernel in kernels}))


def kernel_schedule(path: Path, kernel: Kernel, topology: str) -> KernelSchedule:
    """Compiles one kernel alone and reads its schedule (10 to 60 s).

    Raises ScheduleCompileError if it does not compile, ValueError if a loop's count is unknown.
    """
    report = compile_schedule(
        "atomic_lib.aot.kernels:kernel_program",
        arguments={"path": str(path), "key": kernel.key},
        topology=topology,
    )
    (operation,) = report.kernels
    if operation.cycles is None:
        raise ValueError(
            f"kernel {kernel.name}: a loop of its schedule has no fixed trip count, so its time "
            "cannot be predicted"
        )
    return KernelSchedule(
        key=kernel.key,
        name=kernel.name,
        cycles=operation.cycles,
        hbm_bytes=operation.hbm_bytes,
        vmem_bytes=operation.vmem_bytes,
    )
