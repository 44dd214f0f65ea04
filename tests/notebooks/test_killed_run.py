# SPDX-License-Identifier: Apache-2.0
"""Protects: a run whose kernel is killed is refused, and run again it gives the same metrics.

The oracle is an uninterrupted run with the same parameters: every loss, rate and gradient norm of
the resumed run must equal it exactly, on the same machine.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from atomic_lib.evidence import effective_rows, read_rows, verify

KILL_AFTER_STEP = 6
PATIENCE_SECONDS = 300
# The program of test_smoke_runs, so that the compilation cache serves both.
CHANGED = {"batch_size": 8, "max_steps": 16, "warmup_steps": 4, "eval_every": 8,
           "checkpoint_seconds": 1.0}  # fmt: skip
EXACT = {"train": ("loss", "lr", "grad_norm"), "eval": ("ce", "bpb_est", "bpb_exact")}

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1200)]


def start_runner(repository, environment, run):
    folder = repository / "params" / "train_baseline"
    parameters = yaml.safe_load((folder / "smoke.yaml").read_text())
    (folder / f"{run}.yaml").write_text(yaml.safe_dump({**parameters, "run": run, **CHANGED}))
    return subprocess.Popen(
        [sys.executable, "-m", "atomic_lib.run", f"train_baseline/{run}"],
        cwd=repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(condition, runner):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert runner.poll() is None, runner.stdout.read()
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.05)


def figures(folder):
    return [
        (row["kind"], row["step"], *(row[name] for name in EXACT[row["kind"]]))
        for row in effective_rows(read_rows(folder / "metrics.jsonl"))
        if row["kind"] in EXACT
    ]


def test_a_killed_run_is_refused_and_resumes_to_the_same_metrics(repository, environment):
    whole, killed = (
        repository / "outputs" / f"train_baseline-{run}" for run in ("whole", "killed")
    )
    runner = start_runner(repository, environment, "whole")
    shown, _ = runner.communicate()
    assert runner.returncode == 0, shown

    runner = start_runner(repository, environment, "killed")

    def has_a_checkpoint_and_more_steps():
        log = killed / "metrics.jsonl"
        steps = [r["step"] for r in read_rows(log) if r["kind"] == "train"] if log.exists() else []
        saved = list(killed.glob("checkpoints/*/commit.json"))
        return bool(saved) and max(steps, default=0) >= KILL_AFTER_STEP

    wait_until(has_a_checkpoint_and_more_steps, runner)
    os.kill(json.loads((killed / "heartbeat.json").read_text())["pid"], signal.SIGKILL)
    shown, _ = runner.communicate()
    assert runner.returncode != 0, shown
    assert verify(killed) != []
    assert not (killed / "SUCCESS.json").exists()

    runner = start_runner(repository, environment, "killed")
    shown, _ = runner.communicate()
    assert runner.returncode == 0, shown
    assert verify(killed) == []
    events = [r["event"] for r in read_rows(killed / "metrics.jsonl") if r["kind"] == "event"]
    assert "resume" in events
    assert figures(killed) == figures(whole)
