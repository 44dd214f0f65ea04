# SPDX-License-Identifier: Apache-2.0
"""The command line of the runner: `python -m atomic_lib.run PARAMS ...`."""

import sys

from atomic_lib.run.command import main

if __name__ == "__main__":
    sys.exit(main())
