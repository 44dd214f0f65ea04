# SPDX-License-Identifier: Apache-2.0
"""`python -m atomic_lib.hosts train/<run>`: one process of a training run."""

import argparse
from pathlib import Path

from atomic_lib.hosts.job import run_training

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Runs until the run's end; an error ends the process with a traceback."""
    parser = argparse.ArgumentParser(prog="python -m atomic_lib.hosts", description=__doc__)
    parser.add_argument("name", help="<notebook>/<run> of a training parameter file")
    print(run_training(parser.parse_args().name, ROOT).summary())


if __name__ == "__main__":
    main()
