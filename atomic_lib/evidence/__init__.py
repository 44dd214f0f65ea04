# SPDX-License-Identifier: Apache-2.0
"""Run folders that a stranger can check. Imports the standard library only.

    run_folder    outputs/<run_id>/: opened, filled, closed by success or failure
    metrics_log   metrics.jsonl, its chain of rows, and what a resume supersedes
    manifest      what the run was made from
    seal          SUCCESS.json, FAILED.json, SHA256SUMS
    bundle        the zip
    report        report.html from the executed notebook
    verify        the check, one file that also travels in every run folder

`python -m atomic_lib.evidence verify|zip|seal RUN` does from a shell what these do.
"""

from atomic_lib.evidence.bundle import zip_run
from atomic_lib.evidence.metrics_log import MetricsLog, effective_rows, read_rows
from atomic_lib.evidence.run_folder import RunFolder
from atomic_lib.evidence.seal import seal
from atomic_lib.evidence.verify import verify

__all__ = [
    "MetricsLog",
    "RunFolder",
    "effective_rows",
    "read_rows",
    "seal",
    "verify",
    "zip_run",
]
