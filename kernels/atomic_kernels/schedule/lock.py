# SPDX-License-Identifier: Apache-2.0
"""The record of shipped kernels' schedules, and the gate that refuses slower ones.

    python -m atomic_kernels.schedule.lock check     compiles every case and compares
    python -m atomic_kernels.schedule.lock update    compiles every case and rewrites the record

The record, schedule.lock.json beside the distribution's pyproject.toml, holds for each libtpu
version and case the static cycles and VMEM of every kernel. Cycles are the compiler's own and do
not depend on the machine, so a difference is a change of the kernels or of the compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atomic_kernels.schedule.compiler import compile_schedule
from atomic_kernels.schedule.report import ScheduleReport, write_whole

LOCK_PATH = Path(__file__).parents[2] / "schedule.lock.json"
# Growth of cycles or VMEM that fails the gate. Reordering a kernel without intent moves its
# cycles by 1-2 %; a lost optimisation costs more than 3 %.
ALLOWED_GROWTH = 0.03


@dataclass(frozen=True, kw_only=True)
class LockedCase:
    """One shipped configuration: a factory of `atomic_kernels.audit.programs` and its arguments."""

    program: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    topology: str = "v5e:2x4"

    @property
    def target(self) -> str:
        """The factory as `compile_schedule` wants it."""
        return f"atomic_kernels.audit.programs:{self.program}"


LAYER = {"B": 4, "T": 2048, "H": 8}
LAYER_PROJECTIONS = {**LAYER, "decay_dtype": "bfloat16", "projections": True}
# (B8, T4096, H6, 128) unless said; layer is one chip's part of a 307M model's layer.
LOCKED_CASES: dict[str, LockedCase] = {
    "bf16_forward": LockedCase(program="forward"),
    "bf16_training": LockedCase(program="training"),
    "f32_training": LockedCase(program="training", arguments={"dtype": "float32"}),
    "layer_training": LockedCase(program="training", arguments=LAYER),
    "layer_projections_training": LockedCase(program="training", arguments=LAYER_PROJECTIONS),
    "layer_decay_parameters_training": LockedCase(
        program="training",
        arguments={**LAYER_PROJECTIONS, "decay_parameters": True},
    ),
    "bf16_decode_step": LockedCase(program="decode_step"),
    "layer_norm_training": LockedCase(program="norm_training"),
    "layer_norm_of_sum_training": LockedCase(program="norm_training", arguments={"summands": 3}),
    "head_norm_training": LockedCase(
        program="norm_training", arguments={"group": 128, "centred": False}
    ),
}


def lock_entry(report: ScheduleReport) -> dict[str, Any]:
    """What is recorded of a report: cycles and VMEM by kernel, and what runs around them."""
    return {
        "kernels": {
            kernel.name: {
                "cycles": kernel.cycles,
                "with_stalls": None
                if kernel.cycles is None or kernel.stall_cycles is None
                else kernel.cycles + kernel.stall_cycles,
                "vmem_bytes": kernel.vmem_bytes,
            }
            for kernel in report.kernels
        },
        "kernel_cycles": report.kernel_cycles,
        "other_cycles": _difference(report.cycles, report.kernel_cycles),
    }


def measure(name: str) -> tuple[str, dict[str, Any]]:
    """Compiles one locked case; returns the libtpu version and the entry to record.

    Raises ValueError for an unknown case, and what `compile_schedule` raises.
    """
    if name not in LOCKED_CASES:
        raise ValueError(f"case: {name!r} is none of {sorted(LOCKED_CASES)}")
    case = LOCKED_CASES[name]
    report = compile_schedule(case.target, arguments=dict(case.arguments), topology=case.topology)
    return report.libtpu_version, lock_entry(report)


def regressions(name: str, locked: Mapping[str, Any] | None, found: Mapping[str, Any]) -> list[str]:
    """What is worse than the record, one sentence each; empty when nothing is.

    locked is None for a case or libtpu version that was never recorded.
    """
    update = (
        "Run `python -m atomic_kernels.schedule.lock update` and commit the file if it is meant."
    )
    if locked is None:
        return [f"{name}: not in the record for this libtpu. {update}"]
    worse = []
    for quantity in ("kernel_cycles", "other_cycles"):
        worse += _growth(f"{name}: {quantity}", locked[quantity], found[quantity])
    for kernel, values in found["kernels"].items():
        before = locked["kernels"].get(kernel)
        if before is None:
            worse.append(f"{name}: kernel {kernel} is not in the record.")
            continue
        for quantity in ("cycles", "vmem_bytes"):
            worse += _growth(f"{name}: {quantity} of {kernel}", before[quantity], values[quantity])
    return [f"{sentence} {update}" for sentence in worse]


def _growth(what: str, before: int | None, after: int | None) -> list[str]:
    if after is None:
        return [] if before is None else [f"{what} were {before} and are now unknown."]
    if before is not None and after <= before * (1 + ALLOWED_GROWTH):
        return []
    if before is None:
        return [f"{what} were unknown and are now {after}."]
    change = 100 * (after / before - 1) if before else float("inf")
    return [f"{what} grew from {before} to {after} ({change:+.1f} %)."]


def read_lock(path: Path = LOCK_PATH) -> dict[str, Any]:
    """The record: libtpu version to case to entry. Empty where there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def release(libtpu_version: str) -> str:
    """The part of a libtpu version that decides the schedule: 0.0.42 of 0.0.42.1."""
    return ".".join(libtpu_version.split(".")[:3])


def update_lock(names: Sequence[str], path: Path = LOCK_PATH) -> dict[str, Any]:
    """Compiles the named cases and writes their entries into the record; returns the record."""
    lock = read_lock(path)
    for name in names:
        version, entry = measure(name)
        lock.setdefault(release(version), {})[name] = entry
        print(f"{name}: {entry['kernel_cycles']} kernel cycles", flush=True)
    ordered = {version: dict(sorted(lock[version].items())) for version in sorted(lock)}
    write_whole(path, json.dumps(ordered, indent=1) + "\n")
    return ordered


def check_lock(names: Sequence[str], path: Path = LOCK_PATH) -> list[str]:
    """Compiles the named cases and returns every regression against the record."""
    lock, problems = read_lock(path), []
    for name in names:
        version, found = measure(name)
        problems += regressions(name, lock.get(release(version), {}).get(name), found)
    return problems


def main(words: Sequence[str] | None = None) -> int:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m atomic_kernels.schedule.lock")
    parser.add_argument("action", choices=["check", "update"])
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    options = parser.parse_args(words)
    names = options.cases or list(LOCKED_CASES)
    if options.action == "update":
        update_lock(names)
        return 0
    problems = check_lock(names)
    print(
        "\n".join(problems) or f"{len(names)} cases are within {ALLOWED_GROWTH:.0%} of the record"
    )
    return 1 if problems else 0


def _difference(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None else total - part


if __name__ == "__main__":
    sys.exit(main())
