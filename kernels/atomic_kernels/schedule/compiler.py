# SPDX-License-Identifier: Apache-2.0
"""Compiles a function for a TPU topology in a subprocess and reads the schedule it leaves.

No TPU is needed: libtpu compiles on any x86-64 Linux host. The subprocess writes, beside the HLO,
a few text dumps of each kernel and fusion into a temporary folder; `read_dump` turns them into
a ScheduleReport.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomic_kernels.schedule.chips import Chip, chip_for_topology
from atomic_kernels.schedule.dump import DUMPED_PASSES, Dump
from atomic_kernels.schedule.hlo import HloModule
from atomic_kernels.schedule.operations import operation_from_dump
from atomic_kernels.schedule.report import ScheduleReport


class ScheduleUnavailableError(RuntimeError):
    """This machine cannot compile for a TPU; the message says what is missing."""


class ScheduleCompileError(RuntimeError):
    """The function did not compile for the topology; the message holds the compiler's words."""


def require_compiler() -> None:
    """Raises ScheduleUnavailableError, saying what to do, where no TPU compiler can run."""
    machine = (platform.system(), platform.machine())
    if machine != ("Linux", "x86_64"):
        raise ScheduleUnavailableError(
            f"reading TPU schedules needs Linux on x86-64, this is {machine[0]} on {machine[1]}: "
            "libtpu has no other build. Run it in a container or on a Linux host."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ScheduleUnavailableError(
            "reading TPU schedules needs the libtpu package (no TPU is needed): install the one "
            f"that belongs to this jax with `{sys.executable} -m pip install 'jax[tpu]=="
            f"{_jax_version()}'`."
        )


def compile_schedule(
    target: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    topology: str = "v5e:2x4",
    devices: int = 1,
    dump_directory: str | Path | None = None,
    timeout_seconds: float = 1800.0,
) -> ScheduleReport:
    """Compiles a function for `devices` chips of `topology` and reports its static schedule.

    target           "package.module:factory" or "path/file.py:factory". The factory is called in
                     the subprocess with `arguments` (JSON values) and returns (function, args):
                     a function or jitted function, and a tuple of ShapeDtypeStructs (or trees of
                     them). If it has a parameter `mesh` it gets the mesh of the chosen devices
                     (one axis, "devices") and may put shardings on the structs; a struct without
                     one is replicated.
    topology         CHIP:SHAPE, "v5e:2x4" or "v6e:2x4" for example.
    dump_directory   an empty or new folder that keeps the compiler's texts; None removes them.

    Raises ScheduleUnavailableError without libtpu or on another platform, ValueError for a bad
    topology, target or folder, ScheduleCompileError when the function does not compile.
    """
    chip = chip_for_topology(topology)
    require_compiler()
    request = {
        "target": _absolute_target(target),
        "arguments": dict(arguments or {}),
        "topology": topology,
        "devices": devices,
    }
    json.dumps(request)  # refuses arguments that cannot reach the subprocess, before it starts
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as scratch:
        dump = Path(scratch) / "dump" if dump_directory is None else Path(dump_directory)
        dump.mkdir(parents=True, exist_ok=True)
        if any(dump.iterdir()):
            raise ValueError(
                f"dump_directory: {dump} is not empty: texts of another compile would be read "
                "as this one's. Give an empty or new folder."
            )
        result = _run_worker(request, chip, dump, Path(scratch), timeout_seconds)
        return read_dump(request, result, dump)


def read_dump(
    request: Mapping[str, Any], result: Mapping[str, Any], folder: Path
) -> ScheduleReport:
    """The report of a compile from the worker's result and the texts in `folder`."""
    module = HloModule(result["hlo"])
    chip, dump = chip_for_topology(request["topology"]), Dump(folder)
    return ScheduleReport(
        target=request["target"],
        arguments=dict(request["arguments"]),
        topology=request["topology"],
        devices=request["devices"],
        device_kind=result["device_kind"],
        jax_version=result["jax_version"],
        libtpu_version=result["libtpu_version"],
        compile_seconds=result["compile_seconds"],
        memory=dict(result["memory"]),
        operations=tuple(operation_from_dump(work, dump, chip) for work in module.work()),
    )


def _run_worker(
    request: Mapping[str, Any], chip: Chip, dump: Path, scratch: Path, timeout_seconds: float
) -> dict[str, Any]:
    request_path, result_path = scratch / "request.json", scratch / "result.json"
    request_path.write_text(json.dumps(request))
    command = [sys.executable, "-m", "atomic_kernels.schedule.worker"]
    try:
        finished = subprocess.run(
            [*command, str(request_path), str(result_path)],
            env=worker_environment(os.environ, chip, dump),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ScheduleCompileError(
            f"{request['target']} did not compile within {timeout_seconds:.0f} s: raise "
            "timeout_seconds, or look for a loop that is unrolled over a long axis."
        ) from error
    if not result_path.exists():
        raise ScheduleCompileError(
            f"the compiler ended with status {finished.returncode} and no result for "
            f"{request['target']}. Its last words:\n{finished.stderr[-3000:]}"
        )
    result = json.loads(result_path.read_text())
    if "error" in result:
        raise ScheduleCompileError(_explain(request, result))
    return result


def _explain(request: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The compiler's error with what usually helps."""
    advice = "The traceback below is the subprocess's."
    if re.search(r"vmem|RESOURCE_EXHAUSTED.*scoped", result["error"], re.IGNORECASE):
        advice = (
            "The kernel needs more VMEM than its limit: use smaller blocks or fewer heads a "
            "step, or raise vmem_limit_bytes in pltpu.CompilerParams."
        )
    return (
        f"{request['target']} with arguments {request['arguments']} does not compile for "
        f"{request['topology']} ({result['error_kind']}). {advice}\n"
        f"{result['error'][:4000]}\n{result['traceback'][-4000:]}"
    )


def worker_environment(base: Mapping[str, str], chip: Chip, dump: Path) -> dict[str, str]:
    """The subprocess's environment: a TPU compiler without a TPU, its dumps going to `dump`."""
    environment = dict(base)
    environment.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=chip.accelerator_type,
        TPU_WORKER_HOSTNAMES="localhost",
        # Compile-only use may share the machine with another process that has libtpu loaded.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # A compile served from jax's cache leaves no dump.
        JAX_ENABLE_COMPILATION_CACHE="false",
        LIBTPU_INIT_ARGS=" ".join(
            [
                base.get("LIBTPU_INIT_ARGS", ""),
                f"--xla_jf_dump_to={dump}",
                "--xla_jf_dump_llo_text=true",
                f"--xla_jf_dump_llo_pass_label_regex={DUMPED_PASSES}",
            ]
        ).strip(),
        PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path),
    )
    return environment


def _absolute_target(target: str) -> str:
    source, separator, name = target.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if separator and source.endswith(".py") else target


def _jax_version() -> str:
    import jax

    return jax.__version__
