# SPDX-License-Identifier: Apache-2.0
"""The last files of a run: SUCCESS.json or FAILED.json, SHA256SUMS, and the runner's seal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomic_lib.evidence.files import atomic_write, write_json
from atomic_lib.evidence.manifest import utc_now
from atomic_lib.evidence.metrics_log import effective_rows, read_rows
from atomic_lib.evidence.verify import (
    CHECKPOINTS,
    FAILED,
    METRICS,
    NOTEBOOK,
    REPORT,
    STOP_REASONS,
    SUCCESS,
    SUMS,
    evidence_files,
    json_text,
    sha256_bytes,
    sha256_file,
    success_digest,
    sums_text,
    verify,
)

SUCCESS_SCHEMA = "atomic-success/1"
FAILED_SCHEMA = "atomic-failed/1"


def write_success(
    path: Path,
    *,
    manifest: Mapping[str, Any],
    stop_reason: str,
    results: dict[str, Any],
    elapsed_seconds: float,
    earlier_files: list[str],
) -> dict[str, Any]:
    """Writes SUCCESS.json over every file in the folder but the runner's, then SHA256SUMS.

    `earlier_files` are the ones that this session found and left as they were. Raises ValueError
    for an unknown stop_reason, RuntimeError if FAILED.json is there.
    """
    if stop_reason not in STOP_REASONS:
        raise ValueError(f"stop_reason: {stop_reason!r} is not one of {', '.join(STOP_REASONS)}")
    if (path / FAILED).exists():
        raise RuntimeError(f"{path / FAILED} is there: a step of this run failed; run it again")
    step, tokens = _final_position(path)
    names = [n for n in evidence_files(path) if n not in (SUCCESS, NOTEBOOK, REPORT)]
    success = {
        "schema": SUCCESS_SCHEMA,
        "run_id": manifest["run_id"],
        "notebook": manifest["notebook"],
        "started_at": manifest["started_at"],
        "finished_at": utc_now(),
        "elapsed_s": elapsed_seconds,
        "stop_reason": stop_reason,
        "final_step": step,
        "final_tokens": tokens,
        "results": results,
        "checkpoint": _last_checkpoint(path),
        "metrics": _chain_end(path),
        "earlier_files": earlier_files,
        "sealed": False,
        "files": {name: _digest(path, name) for name in names},
    }
    _write_sealed(path, success)
    return success


def seal(path: Path) -> dict[str, Any]:
    """Takes notebook.ipynb (and report.html) of a finished run into SUCCESS.json and SHA256SUMS.

    Raises ValueError with the problems if the run is not verified before or after.
    """
    path = Path(path)
    _require_verified(path)
    success = json.loads((path / SUCCESS).read_text(encoding="utf-8"))
    for name in (NOTEBOOK, REPORT):
        if (path / name).is_file():
            success["files"][name] = sha256_file(path / name)
    success["files"] = dict(sorted(success["files"].items()))
    success["sealed"] = True
    _write_sealed(path, success)
    _require_verified(path)
    return success


def write_failure(
    path: Path, *, reason: str, traceback_lines: list[str], recorded_by: str, **facts: Any
) -> None:
    """Writes FAILED.json, after `drop_success`."""
    drop_success(path)
    record = {
        "schema": FAILED_SCHEMA,
        "run_id": path.name,
        "failed_at": utc_now(),
        "reason": reason,
        "traceback": "".join(f"{line.rstrip()}\n" for line in traceback_lines).splitlines(),
        "recorded_by": recorded_by,
    }
    write_json(path / FAILED, record | facts)


def drop_success(path: Path) -> None:
    """Removes SUCCESS.json, SHA256SUMS and the zip that was made from them."""
    for stale in (path / SUCCESS, path / SUMS, path.with_name(path.name + ".zip")):
        stale.unlink(missing_ok=True)


def _write_sealed(path: Path, success: dict[str, Any]) -> None:
    success["digest"] = success_digest(success)
    data = json_text(success).encode()
    (path / SUMS).unlink(missing_ok=True)
    atomic_write(path / SUCCESS, data)
    atomic_write(path / SUMS, sums_text(success["files"], sha256_bytes(data)).encode())


def _require_verified(path: Path) -> None:
    problems = verify(path)
    if problems:
        raise ValueError(f"{path} is not verified: " + "; ".join(problems))


def _digest(path: Path, name: str) -> str:
    if (path / name).is_symlink():
        raise ValueError(f"{path / name} is a link; evidence must hold the file itself")
    if "\n" in name or "\\" in name:  # sha256sum writes such names in another form
        raise ValueError(f"{path / name}: a file name in evidence has no newline or backslash")
    return sha256_file(path / name)


def _final_position(path: Path) -> tuple[int | None, int | None]:
    if not (path / METRICS).exists():
        return None, None
    trained = [r for r in effective_rows(read_rows(path / METRICS)) if r["kind"] == "train"]
    return (trained[-1]["step"], trained[-1]["tokens"]) if trained else (None, None)


def _chain_end(path: Path) -> dict[str, Any] | None:
    if not (path / METRICS).exists():
        return None
    lines = (path / METRICS).read_bytes().split(b"\n")[:-1]
    return {"rows": len(lines), "last_row_sha256": sha256_bytes(lines[-1] if lines else b"")}


def _last_checkpoint(path: Path) -> dict[str, str] | None:
    """Folder and commit hash of the newest committed checkpoint (by the step that it states)."""
    commits = {}
    for commit in sorted((path / CHECKPOINTS).rglob("commit.json")):
        step = json.loads(commit.read_text(encoding="utf-8"))["step"]
        commits[step] = commit
    if not commits:
        return None
    newest = commits[max(commits)]
    return {
        "path": newest.parent.relative_to(path).as_posix(),
        "commit_sha256": sha256_file(newest),
    }
