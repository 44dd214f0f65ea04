# SPDX-License-Identifier: Apache-2.0
"""How a run ended. It counts only if its sealed folder verifies; all else leaves FAILED.json."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atomic_lib.evidence import seal, zip_run
from atomic_lib.evidence.report import write_report
from atomic_lib.evidence.seal import drop_success, write_failure
from atomic_lib.evidence.verify import FAILED, NOTEBOOK, REPORT, SUCCESS
from atomic_lib.run.jobs import Job

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Where papermill's own stack begins; what stands before it is the kernel's.
PAPERMILL_TRACEBACK = "Traceback (most recent call last)"
HEADLINES = ("bpb_exact",)
LOG_LINES = 40  # of papermill's and the kernel's own output, kept in FAILED.json


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one job. `result` is verified, failed, interrupted or not started."""

    job: Job
    result: str
    seconds: float = 0.0
    reason: str = ""
    traceback: list[str] = field(default_factory=list)
    key_figure: str = ""

    @property
    def shown_report(self) -> str:
        """Path of report.html from the current folder, or of FAILED.json, or nothing."""
        for name in (FAILED, REPORT):
            if (self.job.folder / name).is_file():
                return os.path.relpath(self.job.folder / name)
        return ""


def close_run(job: Job, *, exit_code: int, stopped_by: str, seconds: float, log: str) -> Outcome:
    """Seals a run that succeeded, and verifies it; otherwise sees to it that FAILED.json is there.

    `exit_code` is papermill's, `stopped_by` the signal that this process passed on (or ""), `log`
    what papermill and the kernel printed.
    """
    log = _ANSI.sub("", log)
    if stopped_by or exit_code != 0 or not (job.folder / SUCCESS).is_file():
        result = "interrupted" if stopped_by else "failed"
        reason = _reason(job, exit_code, stopped_by, log)
        return _failure(job, result=result, reason=reason, seconds=seconds, log=log)
    try:
        write_report(job.folder)
        success = seal(job.folder)
        archive = job.folder.with_name(job.folder.name + ".zip")
        if archive.exists():  # the notebook made its download before the seal
            zip_run(job.folder)
    except (ValueError, OSError) as error:
        return _failure(job, result="failed", reason=str(error), seconds=seconds, log=log)
    return Outcome(
        job=job, result="verified", seconds=seconds, key_figure=_key_figure(success["results"])
    )


def _failure(job: Job, *, result: str, reason: str, seconds: float, log: str) -> Outcome:
    lines = log.splitlines()[-LOG_LINES:]
    if not (job.folder / FAILED).is_file():
        traceback = _notebook_error(job.folder / NOTEBOOK)
        write_failure(
            job.folder, reason=reason, traceback_lines=traceback, recorded_by="runner", log=lines
        )
    else:  # the kernel's own record stays; a SUCCESS.json beside it must go
        drop_success(job.folder)
    record = json.loads((job.folder / FAILED).read_text(encoding="utf-8"))
    return Outcome(
        job=job,
        result=result,
        seconds=seconds,
        reason=record["reason"],
        traceback=record["traceback"] or log.partition(PAPERMILL_TRACEBACK)[0].splitlines(),
    )


def _reason(job: Job, exit_code: int, stopped_by: str, log: str) -> str:
    if stopped_by:
        return f"stopped by {stopped_by}"
    error = _notebook_error(job.folder / NOTEBOOK)
    if error:
        return error[-1]
    if exit_code != 0:
        last = log.strip().rpartition("\n")[2]
        if "DeadKernelError" in last:
            return "the kernel died in a cell: killed, out of memory, or a crash below Python"
        return f"papermill ended with exit code {exit_code}: {last}"
    return "the notebook ended without SUCCESS.json: a cell left early, or never called succeed"


def _notebook_error(path: Path) -> list[str]:
    """Traceback lines of the first cell that ended in an error, or an empty list."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return []
    for cell in cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                text = _ANSI.sub("", "\n".join(output["traceback"]))
                return text.splitlines() or [f"{output['ename']}: {output['evalue']}"]
    return []


def _key_figure(results: dict[str, Any]) -> str:
    """A headline of the results that the notebook stated, or the first number among them."""
    for name, value in sorted(results.items(), key=lambda item: item[0] not in HEADLINES):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f"{name.replace('_', ' ')} {value:.6g}"
    return ""
