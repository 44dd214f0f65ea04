# SPDX-License-Identifier: Apache-2.0
"""Repeats a recorded run with its own learning rates, and says whether it came out the same.

A schedule by wall clock depends on how fast the machine was, so such a run can be repeated only
with the rates that it wrote down. On the platform and the number of devices of the record every
number comes out again, bit for bit; on others the losses agree to rounding. The audit is written to
replay.json: the record it was made from (by hash), how many rows were compared, whether all were
equal, the first that was not, and the largest difference of each quantity.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.evidence import effective_rows, read_rows
from atomic_lib.evidence.verify import METRICS, sha256_file
from atomic_lib.train.schedule import RecordedSchedule

Row = Mapping[str, Any]

REPLAY = "replay.json"
# What does not depend on the speed of the machine.
COMPARED = {
    "train": (
        "tokens", "lr", "elapsed_fraction", "loss", "grad_norm", "finite", "clipped", "skipped",
    ),
    "eval": ("tokens", "ce", "bpb_est", "bpb_exact", "bytes", "target_tokens"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A record to repeat: `rows` of it that count, and the learning rates among them."""

    source: Path
    sha256: str
    run_id: str
    rows: Sequence[Row]
    schedule: RecordedSchedule

    @classmethod
    def of(cls, place: Path) -> "Replay":
        """Reads a run folder or its metrics.jsonl.

        Raises FileNotFoundError if there is none, ValueError if it has no train row.
        """
        source = place / METRICS if place.is_dir() else place
        if not source.is_file():
            raise FileNotFoundError(f"replay: {source} does not exist; name a run folder")
        rows = effective_rows(read_rows(source))
        schedule = RecordedSchedule.from_rows(rows)
        run_id = rows[0]["run_id"] if rows[0]["kind"] == "header" else ""
        return cls(
            source=source, sha256=sha256_file(source), run_id=run_id, rows=rows, schedule=schedule
        )

    def compare(self, rows: Iterable[Row]) -> dict[str, Any]:
        """The content of replay.json: the replayed `rows` that count against the recorded ones."""
        recorded = {(row["kind"], row["step"]): row for row in self.rows if row["kind"] in COMPARED}
        pairs = [
            (recorded[row["kind"], row["step"]], row)
            for row in rows
            if row["kind"] in COMPARED and (row["kind"], row["step"]) in recorded
        ]
        differences = [
            {"kind": new["kind"], "step": new["step"], "field": name}
            | {"recorded": old.get(name), "replayed": new.get(name)}
            for old, new in pairs
            for name in COMPARED[new["kind"]]
            if old.get(name) != new.get(name)
        ]
        steps = [row["step"] for _, row in pairs if row["kind"] == "train"]
        return {
            "source": self.run_id,
            "metrics_sha256": self.sha256,
            "first_step": min(steps, default=None),
            "last_step": max(steps, default=None),
            "rows": len(pairs),
            "fields": {kind: list(names) for kind, names in COMPARED.items()},
            "bit_exact": bool(pairs) and not differences,
            "differences": len(differences),
            "first_difference": differences[0] if differences else None,
            "largest_relative_difference": _largest(differences),
        }


def _largest(differences: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """By field; None where a number stands against none."""
    largest: dict[str, float | None] = {}
    for one in differences:
        old, new, name = one["recorded"], one["replayed"], one["field"]
        if old is None or new is None or largest.get(name, 0.0) is None:
            largest[name] = None
            continue
        size = max(abs(old), abs(new))
        relative = abs(old - new) / size if size else math.inf
        largest[name] = max(largest.get(name) or 0.0, relative)
    return largest
