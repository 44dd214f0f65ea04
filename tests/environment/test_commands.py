# SPDX-License-Identifier: Apache-2.0
"""Protects: each command that the README names starts in a clone in which nothing was installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(
    set(re.findall(r"python -m (atomic_lib[\w.]*)", (ROOT / "README.md").read_text()))
)


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_of_the_readme_starts(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m {module}" in done.stdout
