# SPDX-License-Identifier: Apache-2.0
"""`python -m atomic_lib.kaggle OWNER [JOB ...]`: writes build/kaggle and prints what uploads it."""

import argparse
import sys
from pathlib import Path

from atomic_lib.kaggle.package import write_push

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for an argument that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m atomic_lib.kaggle", description=__doc__)
    parser.add_argument("owner", help="your Kaggle user name")
    parser.add_argument("jobs", nargs="*", help="train_hybrid/seed1 and the like (default: all)")
    parser.add_argument("--target", type=Path, default=ROOT / "build" / "kaggle")
    given = parser.parse_args(arguments)
    try:
        push = write_push(ROOT, given.target, owner=given.owner, names=given.jobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(push.kernels)} notebook runs and their code are in {given.target}. To upload:")
    print("\n".join(push.commands()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
