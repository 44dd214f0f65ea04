# SPDX-License-Identifier: Apache-2.0
"""The static schedules of a program's Pallas kernels, compiled without the model around them.

The schedule texts of a whole model are gigabytes. So each distinct kernel is taken out of the
compiled program (its code stands in the instruction, its operands' shapes beside it) and called
once, with `jax.ffi.ffi_call`, in a program that holds nothing else and whose texts are kept.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_kernels.schedule import compile_schedule
from atomic_kernels.schedule.hlo import HloModule, Instruction

PALLAS_TARGET = "tpu_custom_call"
VMEM = "1"  # its number in a configuration
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
    vmem_limit_bytes: int  # of the call; 0 if the program does not say
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape)
    results: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class KernelSchedule:
    """What the schedule of one kernel says: cycles are bundles times trips.

    stall_cycles are waits on results that the compiler foresees and leaves to the hardware; waits
    on memory are in neither.
    """

    key: str
    name: str
    cycles: int
    stall_cycles: int
    hbm_bytes: int
    vmem_bytes: int | None


def _arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (_DTYPES[kind], tuple(int(size) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
        if kind in _DTYPES
    )


def _configuration(instruction: Instruction) -> dict[str, Any] | None:
    """A Pallas call's backend_config, which holds its code; None for another instruction."""
    if instruction.opcode != "custom-call":
        return None
    if instruction.attribute(r'custom_call_target="([^"]*)"') != PALLAS_TARGET:
        return None
    _, found, rest = instruction.attributes.partition("backend_config=")
    if not found:
        raise ValueError(f"kernel %{instruction.name}: no backend_config, so its code is unknown")
    whole, _ = json.JSONDecoder().raw_decode(rest)
    return whole


def _code(configuration: dict[str, Any]) -> str:
    """The part of a configuration that the call is made from, as JSON."""
    code = {"custom_call_config": configuration["custom_call_config"]}
    return json.dumps(code, sort_keys=True)


def _vmem_limit_bytes(configuration: dict[str, Any]) -> int:
    configs = configuration.get("scoped_memory_configs", [])
    return max((int(x["size"]) for x in configs if x.get("memory_space") == VMEM), default=0)


def kernel_key(instruction: Instruction) -> str | None:
    """A name for the kernel that an instruction runs, equal for equal code; None if none."""
    configuration = _configuration(instruction)
    return None if configuration is None else _key(instruction, configuration)


def _key(instruction: Instruction, configuration: dict[str, Any]) -> str:
    shapes = re.sub(r"\{[^{}]*\}", "", instruction.shape)
    return hashlib.sha256(f"{_code(configuration)}{shapes}".encode()).hexdigest()[:16]


def distinct_kernels(modules: Iterable[HloModule]) -> tuple[Kernel, ...]:
    """Every different Pallas kernel of the programs, in order of appearance."""
    found: dict[str, Kernel] = {}
    for module in modules:
        for item in module.work():
            instruction = item.instruction
            configuration = _configuration(instruction)
            if configuration is None:
                continue
            key = _key(instruction, configuration)
            if key in found:
                continue
            layouts = instruction.attribute(
                r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}"
            )
            found[key] = Kernel(
                key=key,
                name=re.sub(r"(\.\d+)+$", "", instruction.name),
                configuration=_code(configuration),
                vmem_limit_bytes=_vmem_limit_bytes(configuration),
                operands=_arrays(layouts or ""),
                results=_arrays(instruction.shape),
            )
    return tuple(found.values())


def kernel_program(path: str) -> tuple[Any, tuple[Any, ...]]:
    """A function that runs every kernel of `save_kernels`' file once, and its arguments' shapes.

    `compile_schedule` calls it in the subprocess that compiles. The name of each call holds the
    kernel's key.
    """
    import jax

    kernels = json.loads(Path(path).read_text())

    def shapes(arrays):
        return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for dtype, shape in arrays)

    def run(*operands):
        results = []
        for kernel, own in zip(kernels, operands, strict=True):
            call = jax.ffi.ffi_call(
                PALLAS_TARGET,
                shapes(kernel["results"]),
                custom_call_api_version=1,
                legacy_backend_config=kernel["configuration"],
            )
            with jax.named_scope(f"kernel_{kernel['key']}"):
                results.append(call(*own))
        return results

    # A call made from code alone has the program's limit, so that must be the largest of theirs.
    limit = max(kernel["vmem_limit_bytes"] for kernel in kernels)
    options = {"xla_tpu_scoped_vmem_limit_kib": str(limit // 1024)} if limit else None
    arguments = tuple(shapes(kernel["operands"]) for kernel in kernels)
    return jax.jit(run, compiler_options=options), arguments


def save_kernels(kernels: Iterable[Kernel], path: Path) -> None:
    """Writes the kernels as JSON for `kernel_program`."""
    path.write_text(json.dumps([kernel.__dict__ for kernel in kernels]))


def kernel_schedules(
    kernels: Sequence[Kernel], path: Path, topology: str
) -> dict[str, KernelSchedule]:
    """Compiles the kernels without the model and reads their schedules, by key.

    `path` takes the file of `save_kernels`. Raises ScheduleCompileError if they do not compile,
    ValueError if a loop's count is unknown.
    """
    if not kernels:
        return {}
    save_kernels(kernels, path)
    report = compile_schedule(
        "atomic_lib.aot.kernels:kernel_program", arguments={"path": str(path)}, topology=topology
    )
    schedules = {}
    for kernel in kernels:
        found = [item for item in report.kernels if f"kernel_{kernel.key}" in item.source]
        if len(found) != 1 or found[0].cycles is None:
            raise ValueError(
                f"kernel {kernel.name}: {len(found)} schedules, or a loop without a fixed trip "
                "count; its time cannot be predicted"
            )
        schedules[kernel.key] = KernelSchedule(
            key=kernel.key,
            name=kernel.name,
            cycles=found[0].cycles,
            stall_cycles=found[0].stall_cycles or 0,
            hbm_bytes=found[0].hbm_bytes,
            vmem_bytes=found[0].vmem_bytes,
        )
    return schedules
