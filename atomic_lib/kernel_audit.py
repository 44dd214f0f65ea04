# SPDX-License-Identifier: Apache-2.0
"""The kernel audit as a run: `atomic_kernels.audit` at a configured size, written as evidence.

Each function writes one file of the run folder and returns the rows of its table; rows that miss
their limit stay in both.
"""

from collections.abc import Sequence
from typing import Any

from atomic_kernels import audit
from atomic_kernels.hard_inputs import Shape

from atomic_lib.config import KernelAuditConfig
from atomic_lib.evidence import RunFolder

Row = dict[str, Any]

PRECISIONS = ("f32", "bf16x3", "bf16")
# What a split may change: the rounding of the state where the run was cut, as accuracy promises.
SPLIT_LIMIT = 2e-5


def audit_accuracy(run: RunFolder, config: KernelAuditConfig) -> list[Row]:
    """Outputs and gradients against the float64 recurrence on easy and hard inputs.

    Writes accuracy.json with every row; returns one row a precision and quantity with its worst
    error and the input that gave it.
    """
    rows: list[Row] = []
    with run.recording():
        for done, precision in enumerate(PRECISIONS):
            run.progress("accuracy", done, len(PRECISIONS), f"{precision} against float64")
            rows += audit.accuracy_rows(_shape(config), precision=precision, backend="xla")
        run.write_json("accuracy.json", {"rows": rows})
    return summarise_accuracy(rows)


def summarise_accuracy(rows: Sequence[Row]) -> list[Row]:
    """The worst row of each precision and quantity, and how many of them passed."""
    summary = []
    for precision, quantity in dict.fromkeys((r["precision"], r["quantity"]) for r in rows):
        group = [r for r in rows if (r["precision"], r["quantity"]) == (precision, quantity)]
        worst = max(group, key=lambda row: row["relative RMS"])
        summary.append(
            {
                "precision": precision,
                "quantity": quantity,
                "worst relative RMS": worst["relative RMS"],
                "limit": worst["limit"],
                "passed": f"{sum(row['passed'] for row in group)} of {len(group)}",
                "worst input": worst["content"],
            }
        )
    return summary


def audit_identities(run: RunFolder, config: KernelAuditConfig) -> list[Row]:
    """Causality to the bit, and a run in two parts against the whole. Writes identities.json.

    Returns one row a check and cut: how many inputs passed, and the largest difference.
    """
    shape, cuts = _shape(config), _cuts(config.sequence_length)
    with run.recording():
        run.progress("identities", 0, 2, "causality")
        rows = audit.causality_rows(shape, cuts, backend="xla")
        run.progress("identities", 1, 2, "split runs")
        rows += audit.split_rows(shape, cuts, limit=SPLIT_LIMIT, backend="xla")
        run.write_json("identities.json", {"rows": rows})
    return [
        _summarise_identity(rows, check, cut) for check in ("causality", "split") for cut in cuts
    ]


def _summarise_identity(rows: Sequence[Row], check: str, cut: int) -> Row:
    group = [row for row in rows if row["check"] == check and row["cut"] == cut]
    if check == "causality":
        difference = max(row["tokens that differ"] for row in group)
    else:
        difference = max(max(row["error of o"], row["error of state"]) for row in group)
    return {
        "check": "causal to the bit" if check == "causality" else "split = whole",
        "cut after token": cut,
        "largest difference": difference,
        "limit": 0 if check == "causality" else SPLIT_LIMIT,
        "passed": f"{sum(row['passed'] for row in group)} of {len(group)}",
    }


def audit_times(run: RunFolder, config: KernelAuditConfig) -> list[Row]:
    """Measured times of every backend that can run here, the reference too. Writes timing.json."""
    rows: list[Row] = []
    with run.recording():
        backends = ("tpu", "xla", "reference")
        for done, backend in enumerate(backends):
            run.progress("timing", done, len(backends), backend)
            rows += audit.timing_rows(
                B=config.batch_size,
                T=config.sequence_length,
                H=config.heads,
                K=config.head_dim,
                repeats=config.repeats,
                backends=(backend,),
            )
        run.write_json("timing.json", {"rows": rows})
    columns = ("backend", "direction", "device", "median ms", "first quartile ms",
               "third quartile ms", "tokens a second", "skipped")  # fmt: skip
    return [{name: row.get(name) for name in columns} for row in rows]


def audit_schedules(run: RunFolder, config: KernelAuditConfig) -> list[Row]:
    """Static v5e schedules of ours and the peers. Writes schedules.json.

    Nothing is compiled, and one row says so, unless the run asks for it (`compile_for_tpu`).
    Raises RuntimeError if it asks and there is no TPU compiler here.
    """
    rows: list[Row] = []
    with run.recording():
        if config.compile_for_tpu:
            programs = audit.compared_programs()
            for done, schedule in enumerate(audit.compare_schedules(programs)):
                rows.append(audit.comparison_row(schedule))
                run.progress("schedules", done + 1, len(programs), rows[-1]["implementation"])
        run.write_json("schedules.json", {"rows": rows})
    columns = ("implementation", "dtype", "direction", "static_ms", "with_stalls_ms",
               "at_least_ms", "byte_floor_ms", "matmul_floor_ms", "vmem_mib",
               "spills_and_fills_per_bundle", "failure")  # fmt: skip
    skipped = {"implementation": "none", "failure": "compile_for_tpu is off in this run"}
    return [{name: row.get(name) for name in columns} for row in rows or [skipped]]


def require_passed(run: RunFolder) -> Row:
    """Counts the audit's checks. Raises RuntimeError naming the first that missed its limit."""
    rows = [
        row for name in ("accuracy.json", "identities.json") for row in run.read_json(name)["rows"]
    ]
    failed = [row for row in rows if not row["passed"]]
    with run.recording():
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(rows)} checks failed, first {failed[0]}")
    return {"checks": len(rows), "failed": len(failed)}


def _shape(config: KernelAuditConfig) -> Shape:
    return Shape(
        length=config.sequence_length, key_size=config.head_dim, value_size=config.head_dim
    )


def _cuts(length: int) -> tuple[int, ...]:
    """After the first token, inside a chunk, at a chunk's end and before the last token."""
    return tuple(sorted({1, length // 2 - 5, length // 2, length - 1}))
