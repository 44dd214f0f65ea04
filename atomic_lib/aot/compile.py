# SPDX-License-Identifier: Apache-2.0
"""Compiles a run's real training and evaluation steps for a TPU slice, and reports what they need.

No TPU is used: libtpu compiles on any x86-64 Linux host, in a child process whose environment says
so. The order is: refuse what cannot work, compile both programs, compile each of their Pallas
kernels alone for its static schedule, add up.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from atomic_kernels.schedule.hlo import HloModule

from atomic_lib.aot.costs import ProgramCosts
from atomic_lib.aot.identity import program_identity
from atomic_lib.aot.kernels import KernelSchedule, distinct_kernels, kernel_schedules
from atomic_lib.aot.memory import (
    ChipMemory,
    Problem,
    compile_overflow,
    memory_problem,
    state_floor_bytes,
)
from atomic_lib.aot.report import CompileReport, ProgramReport
from atomic_lib.aot.session import plan_disk, plan_session
from atomic_lib.aot.target import Target, require_aot_compiler
from atomic_lib.config import TrainConfig

PROGRAMS = ("train", "eval")
Progress = Callable[[str], None]


class AotCompileError(RuntimeError):
    """The program did not compile for the slice, for another reason than memory."""


def compile_report(
    config: TrainConfig,
    *,
    topology: str = "v5e-8",
    progress: Progress = lambda text: None,
) -> CompileReport:
    """Reports memory, predicted time, tokens, disk and the verdict for `config` on `topology`.

    topology is "v5e-8" or "v5e:2x4" (see `Target.named`). `progress` is told what happens next.
    Takes seconds for a -smoke preset, minutes for a full one. Raises ValueError for a topology, a
    batch or a mesh that does not work, AotUnavailableError where no TPU compiler can run,
    AotCompileError if the compiler refuses the program. Too little memory is no error: it is in
    the report's problems.
    """
    target = Target.named(topology)
    config.require_devices(target.chips)
    floor = memory_problem(config, target, state_floor_bytes(config), None)
    if floor is not None:
        return _report(config, target, {}, {}, [floor])
    require_aot_compiler()
    with tempfile.TemporaryDirectory(prefix="aot-") as scratch:
        folder = Path(scratch)
        facts = _run_worker(config, target, folder, progress)
        problems = [_memory_problem(config, target, facts[name]) for name in facts]
        if any("error" in found for found in facts.values()):
            return _report(config, target, facts, {}, problems)
        modules = {name: HloModule((folder / f"{name}.hlo.txt").read_text()) for name in PROGRAMS}
        kernels = distinct_kernels(modules.values())
        progress(f"compiling {len(kernels)} kernels alone, for their schedules")
        # A kernel runs on one chip, of whatever slice; this one suits the compiler's default host.
        schedules = kernel_schedules(kernels, folder / "kernels.json", f"{target.chip.name}:2x4")
        programs = {
            name: _program(name, facts[name], module, target, schedules)
            for name, module in modules.items()
        }
    return _report(config, target, facts, programs, problems)


def _program(
    name: str, facts: dict[str, Any], module: HloModule, target: Target,
    schedules: Mapping[str, KernelSchedule],
) -> ProgramReport:  # fmt: skip
    costs = ProgramCosts(module, target.chip, schedules).costs
    used = [kernel.key for kernel in distinct_kernels([module])]
    return ProgramReport.of(name, facts, costs, [schedules[key] for key in used])


def _memory_problem(
    config: TrainConfig, target: Target, facts: Mapping[str, Any]
) -> Problem | None:
    """The memory problem of one program. Raises AotCompileError if it failed for another reason."""
    if "error" not in facts:
        memory = ChipMemory.of(facts)
        return memory_problem(config, target, memory.total, memory)
    overflow = compile_overflow(facts["error"])
    if overflow is None:
        raise AotCompileError(
            f"the program does not compile for {target}: {facts['error'][:2000]}\n"
            f"{facts['traceback'][-4000:]}"
        )
    # What the compiler could not place are temporaries; the arguments lie beside them.
    needed, there = overflow
    return memory_problem(config, target, needed + target.hbm_limit_bytes - there, None)


def _report(
    config: TrainConfig, target: Target, facts: Mapping[str, Any],
    programs: Mapping[str, ProgramReport], problems: list[Problem | None],
) -> CompileReport:  # fmt: skip
    counts = config.model_config.parameter_counts
    state_bytes = state_bytes_of(config)
    disk = plan_disk(config, state_bytes)
    session = None
    if programs:
        session = plan_session(
            config,
            step_seconds=programs["train"].milliseconds / 1e3,
            evaluation_step_seconds=programs["eval"].milliseconds / 1e3,
            compile_seconds=sum(program.compile_seconds for program in programs.values()),
            state_bytes=state_bytes,
        )
    flops = config.model_config.flops_per_token(config.sequence_length) * config.tokens_per_step
    return CompileReport(
        preset=config.preset,
        program=program_identity(config),
        topology=target.topology,
        device_kind=facts["train"]["device_kind"] if programs else None,
        jax_version=metadata.version("jax"),
        libtpu_version=_version("libtpu"),
        parameters=counts,
        tokens_per_step=config.tokens_per_step,
        flops_per_step=flops,
        train=programs.get("train"),
        evaluation=programs.get("eval"),
        session=session,
        disk=disk,
        problems=tuple(found for found in (*problems, disk.problem()) if found is not None),
    )


def state_bytes_of(config: TrainConfig) -> int:
    """Bytes of a checkpoint's arrays: float32 parameters and moments."""
    gradients = 4 * config.model_config.parameter_count
    return state_floor_bytes(config) * config.fsdp - gradients


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _run_worker(
    config: TrainConfig, target: Target, folder: Path, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Runs the child and returns what it wrote about each program it came to."""
    request = {"config": asdict(config), "topology": target.topology, "programs": PROGRAMS}
    request_path = folder / "request.json"
    request_path.write_text(json.dumps(request))
    errors = folder / "stderr.txt"
    command = [sys.executable, "-m", "atomic_lib.aot.worker", str(request_path), str(folder)]
    with open(errors, "w") as stream:
        child = subprocess.Popen(
            command, env=worker_environment(os.environ, target), stdout=subprocess.PIPE,
            stderr=stream, text=True,
        )  # fmt: skip
        try:
            for line in child.stdout or ():
                progress(line.strip())
            child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
    found = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in PROGRAMS
        if (folder / f"{name}.json").exists()
    }
    failed = any("error" in facts for facts in found.values())
    if len(found) < len(PROGRAMS) and not failed:
        words = errors.read_text(errors="replace")[-3000:]
        raise AotCompileError(
            f"the compiling process ended with status {child.returncode} and no result. Its last "
            f"words:\n{words}"
        )
    return found


def worker_environment(base: Mapping[str, str], target: Target) -> dict[str, str]:
    """The child's environment: a TPU compiler without a TPU."""
    return {
        **base,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": target.chip.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Compile-only use may share the machine with another process that has libtpu loaded.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
