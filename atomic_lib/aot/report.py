# SPDX-License-Identifier: Apache-2.0
"""What a run will need and how fast it should be, before any chip is used: the report.

Every time in it is an estimate from a compile ("compiled for v5e, static schedule"); none was
measured on a TPU.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.aot.costs import (
    ASSUMED_HBM_FRACTION,
    ASSUMED_LINK_BYTES_PER_SECOND,
    Cost,
    PartTime,
    part_times,
)
from atomic_lib.aot.kernels import KernelSchedule
from atomic_lib.aot.memory import GIB, ChipMemory, Problem
from atomic_lib.aot.session import GB, KAGGLE_DISK_BYTES, DiskPlan, SessionPlan
from atomic_lib.aot.target import Target
from atomic_lib.evidence.files import write_json

SCHEMA = "atomic-aot/1"
COMPILER, ESTIMATE, CLOCK = "compiler", "estimate", "this machine's clock"
PLAN = "estimate, budget arithmetic of the trainer"
SLOWEST_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program on one chip; times are estimates in milliseconds a call."""

    name: str  # "train" or "eval"
    memory: ChipMemory
    lowering_seconds: float
    compile_seconds: float
    parts: tuple[PartTime, ...]
    slowest: tuple[Cost, ...]  # the instructions that cost most, largest first
    kernels: tuple[KernelSchedule, ...]

    @classmethod
    def of(
        cls, name: str, facts: dict[str, Any], costs: Sequence[Cost],
        kernels: Sequence[KernelSchedule],
    ) -> "ProgramReport":  # fmt: skip
        """From the worker's facts and the costs of the program's instructions."""
        used = sorted(costs, key=lambda cost: cost.seconds, reverse=True)
        return cls(
            name=name,
            memory=ChipMemory.of(facts),
            lowering_seconds=facts["lowering_seconds"],
            compile_seconds=facts["compile_seconds"],
            parts=part_times(costs),
            slowest=tuple(used[:SLOWEST_SHOWN]),
            kernels=tuple(kernels),
        )

    @property
    def milliseconds(self) -> float:
        """Predicted time of one call: XLA's estimates, static schedules, collectives."""
        return sum(part.milliseconds for part in self.parts)

    @property
    def milliseconds_at_bandwidth(self) -> float:
        """The same if every pass over memory ran at the assumed bandwidth: the optimistic end."""
        return sum(part.milliseconds_at_bandwidth for part in self.parts)

    def share(self, part: str) -> float:
        """The part's fraction of the predicted time; 0 for a part that is not there."""
        return sum(p.milliseconds for p in self.parts if p.part == part) / self.milliseconds


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The preflight of one training configuration on one TPU slice.

    `train`, `evaluation` and `session` are None where the compile stopped at a problem.
    """

    preset: str
    program: dict[str, Any]  # `identity.program_identity` of the configuration
    topology: str
    device_kind: str | None  # as jax names it
    jax_version: str
    libtpu_version: str
    parameters: dict[str, int]  # by group
    tokens_per_step: int
    flops_per_step: float
    train: ProgramReport | None
    evaluation: ProgramReport | None
    session: SessionPlan | None
    disk: DiskPlan
    problems: tuple[Problem, ...]

    @property
    def target(self) -> Target:
        """The slice."""
        return Target(topology=self.topology)

    @property
    def fits(self) -> bool:
        """Whether no limit is broken."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The word "fits", or each broken limit with what would help."""
        if self.fits:
            return "fits"
        return "does not fit: " + " | ".join(map(str, self.problems))

    @property
    def predicted_mfu(self) -> float | None:
        """Model FLOPs a step over what the slice could do in the predicted time."""
        if self.train is None:
            return None
        seconds = self.train.milliseconds / 1e3
        return self.flops_per_step / (seconds * self.target.chips * self.target.chip.peak_flops)

    @property
    def basis(self) -> str:
        """How the figures were made, for a caption."""
        chip = self.target.chip
        rate = ASSUMED_HBM_FRACTION * chip.hbm_bytes_per_second / GB
        return (
            f"compiled for {self.target} ({self.topology}, {self.target.hosts} host(s)) with jax "
            f"{self.jax_version} and libtpu {self.libtpu_version}; times are XLA estimates and "
            f"static schedules at {chip.clock_hertz / 1e9:g} GHz, HBM assumed at {rate:.0f} GB/s, "
            f"links at {ASSUMED_LINK_BYTES_PER_SECOND / GB:.0f} GB/s a chip; nothing was measured "
            "on a TPU"
        )

    def rows(self) -> list[dict[str, Any]]:
        """The report as table rows: quantity, value, unit, limit, basis."""
        rows = [
            _row("parameters", sum(self.parameters.values()), "", "", "configuration"),
            *(
                _row(f"  {group}", count, "", "", "configuration")
                for group, count in self.parameters.items()
            ),
        ]
        for program in (self.train, self.evaluation):
            if program is not None:
                rows += self._memory_rows(program) + self._time_rows(program)
        rows += self._session_rows() + self._disk_rows()
        rows.append(_row("verdict", self.verdict, "", "", "all of the above"))
        return rows

    def _memory_rows(self, program: ProgramReport) -> list[dict[str, Any]]:
        name = f"{program.name} step, memory a chip"
        limit = f"{self.target.hbm_limit_bytes / GIB:.2f} GiB"
        return [
            _row(name, round(program.memory.total / GIB, 3), "GiB", limit, COMPILER),
            *(
                _row(f"  {kind.replace('_', ' ')}", round(size / GIB, 3), "GiB", "", COMPILER)
                for kind, size in dataclasses.asdict(program.memory).items()
            ),
        ]

    def _time_rows(self, program: ProgramReport) -> list[dict[str, Any]]:
        whole, name = program.milliseconds, f"{program.name} step, predicted time"
        low = f"{program.milliseconds_at_bandwidth:.1f} ms at full bandwidth"
        rows = [_row(name, round(whole, 2), "ms", low, ESTIMATE)]
        for part in program.parts:
            share = f"{100 * part.milliseconds / whole:.1f} % of the step"
            rows.append(_row(f"  {part.part}", round(part.milliseconds, 2), "ms", share, ESTIMATE))
        seconds = round(program.compile_seconds, 1)
        rows.append(_row(f"{program.name} step, compile time", seconds, "s", "", CLOCK))
        return rows

    def _session_rows(self) -> list[dict[str, Any]]:
        if self.session is None:
            return []
        plan = self.session
        mfu = self.predicted_mfu or 0.0
        budget = "" if plan.budget_seconds is None else f"budget {plan.budget_seconds:,.0f} s"
        per_second = round(self.tokens_per_step / (self.train.milliseconds / 1e3))  # type: ignore[union-attr]
        return [
            _row("predicted MFU", round(100 * mfu, 1), "%", "", ESTIMATE),
            _row("tokens a second", per_second, "", "", ESTIMATE),
            _row("final step", plan.final_step, "", budget, PLAN),
            _row("tokens in the session", plan.tokens, "", "", PLAN),
            _row("one evaluation", round(plan.evaluation_seconds, 1), "s",
                 f"{plan.evaluation_batches} batches", PLAN),
        ]  # fmt: skip

    def _disk_rows(self) -> list[dict[str, Any]]:
        disk, basis = self.disk, "configuration"
        quota = f"{KAGGLE_DISK_BYTES / GB:.0f} GB (Kaggle)"
        kept = f"{disk.checkpoints} at one time"
        return [
            _row("one checkpoint", round(disk.checkpoint_bytes / GB, 3), "GB", kept, basis),
            _row("one export", round(disk.export_bytes / GB, 3), "GB", "", basis),
            _row("disk in use at most", round(disk.total_bytes / GB, 2), "GB", quota, basis),
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready, with the derived figures."""
        return {
            "schema": SCHEMA,
            "basis": self.basis,
            "fits": self.fits,
            "verdict": self.verdict,
            "devices": self.target.chips,
            "predicted_hbm_bytes": self.train and self.train.memory.total,
            "predicted_step_ms": self.train and self.train.milliseconds,
            "predicted_step_ms_at_bandwidth": self.train and self.train.milliseconds_at_bandwidth,
            "predicted_mfu": self.predicted_mfu,
            **dataclasses.asdict(self),
        }

    def save(self, path: Path) -> None:
        """Writes `to_dict` as JSON, whole or not at all."""
        write_json(path, self.to_dict())


def _row(quantity: str, value: Any, unit: str, limit: str, basis: str) -> dict[str, Any]:
    return {"quantity": quantity, "value": value, "unit": unit, "limit or share": limit,
            "basis": basis}  # fmt: skip
