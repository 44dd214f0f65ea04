# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: one JSON object a line, each carrying the sha256 of the line before it."""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from atomic_lib.evidence.files import plain
from atomic_lib.evidence.verify import CHAIN_START, ROWS, sha256_bytes, strict_json

METRICS_SCHEMA = "atomic-metrics/1"
FSYNC_SECONDS = 5.0  # a power cut may cost this much of the log; a killed process costs nothing
CUT_TEXT_LIMIT = 2000  # characters of a torn line that its repair event keeps

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Reads every row of a metrics.jsonl; one torn last line is left out.

    Raises ValueError naming the line if any other line is not a JSON object.
    """
    rows, _ = _read(Path(path))
    return rows


def effective_rows(rows: Iterable[Row]) -> list[Row]:
    """Drops what a resume has superseded: after {"event": "resume", "step": k}, earlier train and
    eval rows of a step above k. They stay in the file; header and event rows are all kept."""
    kept: list[Row] = []
    for row in rows:
        if row["kind"] == "event" and row["event"] == "resume":
            last = row.get("step", 0)
            kept = [r for r in kept if r["kind"] not in ("train", "eval") or r["step"] <= last]
        kept.append(row)
    return kept


class MetricsLog:
    """Appends to a metrics.jsonl, and continues one that an earlier process left.

    Every row reaches the operating system before `append` returns, so a killed process loses
    none; rows reach the disk within 5 s, header, eval and event rows at once.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic):
        self.path = Path(path)
        self._clock = clock
        self._descriptor: int | None = None
        self._count = 0
        self._previous = CHAIN_START
        self._synced_at = clock()
        self._header: Row | None = None

    def start(self, *, run_id: str, tokens_per_step: int, **facts: Any) -> None:
        """Writes the header, or on a resumed log checks that the header there says the same.

        Raises ValueError if run_id or tokens_per_step differ from the log's.
        """
        self.resume()
        wanted = {"run_id": run_id, "tokens_per_step": tokens_per_step}
        if self._count == 0:
            self.append("header", **wanted, **facts)
            return
        header = self._header or {}
        for name, value in wanted.items():
            if header.get(name) != value:
                raise ValueError(
                    f"{name}: {value!r} differs from {header.get(name)!r}, which {self.path} "
                    "began with; use the same configuration or another run name"
                )

    def append(self, kind: str, **fields: Any) -> Row:
        """Writes one row and returns it. Non-finite numbers become null with "nonfinite": true.

        Raises ValueError for an unknown kind. If the disk refuses (OSError), the part of the row
        that was written is taken back, and the log is as it was.
        """
        if kind not in ROWS:
            raise ValueError(f"kind: {kind!r} is not one of {', '.join(ROWS)}")
        descriptor = self._opened()
        if kind == "header":
            fields = {"schema": METRICS_SCHEMA, **fields}
        row = plain({"row": self._count + 1, "kind": kind, **fields, "previous": self._previous})
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
        self._write(descriptor, line + b"\n")
        self._count += 1
        self._previous = sha256_bytes(line)
        if kind == "header":
            self._header = row
        if kind != "train" or self._clock() - self._synced_at >= FSYNC_SECONDS:
            self.sync()
        return row

    def rows(self) -> list[Row]:
        """Every row in the file, superseded ones too (see `effective_rows`)."""
        return read_rows(self.path) if self.path.exists() else []

    def sync(self) -> None:
        """Brings every row to the disk; a checkpoint is saved after this, never before."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            self._synced_at = self._clock()

    def resume(self) -> None:
        """Opens the log at its end. Called by the first `append`; does nothing after that.

        A torn last line is cut off and kept in an event row {"event": "repaired"}. Raises
        RuntimeError naming the line if the chain before it is broken.
        """
        self._opened()

    def _opened(self) -> int:
        if self._descriptor is not None:
            return self._descriptor
        rows, torn = _read(self.path) if self.path.exists() else ([], b"")
        lines = self.path.read_bytes().split(b"\n")[: len(rows)] if rows else []
        self._check_chain(rows, lines)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._descriptor = descriptor
        if torn:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(torn))
        self._count = len(rows)
        self._previous = sha256_bytes(lines[-1]) if lines else CHAIN_START
        self._header = rows[0] if rows and rows[0]["kind"] == "header" else None
        if torn and rows:
            text = torn.decode(errors="replace")[:CUT_TEXT_LIMIT]
            self.append("event", event="repaired", cut_bytes=len(torn), cut_text=text)
        return descriptor

    def _check_chain(self, rows: list[Row], lines: list[bytes]) -> None:
        previous = CHAIN_START
        for number, (row, line) in enumerate(zip(rows, lines, strict=True), 1):
            if row.get("previous") != previous:
                raise RuntimeError(
                    f"{self.path}:{number}: does not carry the sha256 of the line before it, so "
                    "the record was changed after it was written; move the file away to begin anew"
                )
            previous = sha256_bytes(line)

    @staticmethod
    def _write(descriptor: int, data: bytes) -> None:
        size = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise


def _read(path: Path) -> tuple[list[Row], bytes]:
    """All whole rows, and the bytes of a torn last line (with its newline if it has one)."""
    data = path.read_bytes()
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = strict_json(line)
            if not (isinstance(row, dict) and "kind" in row and line.endswith(b"\n")):
                raise ValueError("not a whole row")
        except ValueError as error:
            if number == len(lines):
                return rows, line
            raise ValueError(f"{path}:{number}: {error}") from error
        rows.append(row)
    return rows, b""
