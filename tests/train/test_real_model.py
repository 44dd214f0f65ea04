# SPDX-License-Identifier: Apache-2.0
"""Protects exact resume of the language model itself across real process deaths.

Oracle: the uninterrupted process, bit for bit. The model has a GDN-2 and an MLA mixer, depth
routing and dropout; the step accumulates two slices. One process is killed with SIGKILL, a second
one ends itself on SIGTERM, a third one finishes; the files on disk are all that they share.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import numbers, write_tokens

from atomic_lib.evidence import read_rows, verify

SCRIPT = Path(__file__).with_name("killable.py")
ROOT = SCRIPT.parents[2]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    base = tmp_path_factory.mktemp("killed")
    tokens = write_tokens(base / "tokens")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(base / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)]),
    }

    def run(name, *kill):
        arguments = [sys.executable, str(SCRIPT), str(tokens), str(base / name), *kill]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        return base / name, done

    return run


def test_killed_and_stopped_and_resumed_equals_uninterrupted(launch):
    whole, done = launch("whole")
    assert done.returncode == 0, done.stderr
    assert verify(whole) == []

    path, done = launch("killed", "SIGKILL", "5")
    assert done.returncode == -signal.SIGKILL
    assert verify(path) == ["SUCCESS.json: missing: the run did not finish"]

    path, done = launch("killed", "SIGTERM", "9")
    assert done.returncode == 1
    assert "TrainingInterrupted: SIGTERM stopped training at step 9" in done.stderr
    assert verify(path)[0].startswith("FAILED.json: the run failed: TrainingInterrupted")

    path, done = launch("killed")
    assert done.returncode == 0, done.stderr
    assert verify(path) == []
    resumed = [
        row["step"] for row in read_rows(path / "metrics.jsonl") if row.get("event") == "resume"
    ]
    assert resumed == [4, 9]
    assert numbers(path) == numbers(whole)
