# SPDX-License-Identifier: Apache-2.0
"""`python -m atomic_lib.evidence verify|zip|seal RUN ...`. Exit code 0: it holds for every run."""

import argparse
import sys
from pathlib import Path

from atomic_lib.evidence import seal, zip_run
from atomic_lib.evidence.report import write_report
from atomic_lib.evidence.verify import NOTEBOOK, REPORT
from atomic_lib.evidence.verify import main as verify_main


def _seal(path: Path) -> Path:
    """Closes a run whose notebook was executed without the runner, by papermill or by hand."""
    if (path / NOTEBOOK).is_file() and not (path / REPORT).exists():
        write_report(path)
    seal(path)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Runs one command on every run folder named and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atomic_lib.evidence", description=__doc__)
    parser.add_argument(
        "command",
        choices=("verify", "zip", "seal"),
        help="verify: check hashes, record and notebook with the standard library only; "
        "zip: verify and write RUN.zip beside the folder, without checkpoints; "
        "seal: write report.html from notebook.ipynb and take both into the hashes",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="outputs/<run>")
    options = parser.parse_args(arguments)
    if options.command == "verify":
        return verify_main(options.runs)
    action = {"zip": zip_run, "seal": _seal}[options.command]
    refused = 0
    for run in options.runs:
        try:
            print(action(run))
        except ValueError as error:
            refused += 1
            print(error, file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
