# SPDX-License-Identifier: Apache-2.0
"""Protects: the way from text to a comparison of two trained models, and a run killed on it.

The evidence is judged by `verify`, which shares no code with what wrote it. The hybrid trains on
eight fake devices, so that the mesh of a v5e-8 is exercised too. Compiling is most of the time, so
the Baseline has one block and the hybrid's two blocks one mixer of each kind. 07_train has the
cells of 02 and 03 (see test_sources). The oracle of the killed run is the Baseline's smoke run:
every loss, rate and gradient norm of the resumed run must equal it exactly, on the same machine.
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

# Sequences for eight devices, one each, and as many in every run, or they could not be compared. A
# high rate, so that few steps show that a model learns.
TRAINING = {
    "batch_size": 8, "learning_rate": 8e-3, "max_steps": 12, "warmup_steps": 4, "eval_every": 6,
}  # fmt: skip
BASELINE = TRAINING | {"model": {"num_blocks": 1}}
HYBRID = TRAINING | {"model": {"block": ["gdn2", "mla"]}}
# A run must end below this fraction of its loss before the first step.
CLEARLY_BELOW = 0.9
KILL_AFTER_STEP = 5
PATIENCE_SECONDS = 300
EXACT = {"train": ("loss", "lr", "grad_norm"), "eval": ("ce", "bpb_est", "bpb_exact")}

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1200)]


def assert_it_learned(folder, devices):
    losses = [
        row["ce"]
        for row in effective_rows(read_rows(folder / "metrics.jsonl"))
        if row["kind"] == "eval"
    ]
    assert losses[-1] < CLEARLY_BELOW * losses[0]
    used = json.loads((folder / "manifest.json").read_text())["devices"]
    assert len(used["devices"]) == devices


@pytest.fixture(scope="module")
def baseline(run_smoke):
    return run_smoke("train_baseline", **BASELINE)


@pytest.fixture(scope="module")
def hybrid(run_smoke):
    quick = os.environ["XLA_FLAGS"]  # this process's own: see tests/conftest.py
    eight = f"--xla_force_host_platform_device_count=8 {quick}"
    return run_smoke("train_hybrid", xla_flags=eight, **HYBRID)


def test_the_baseline_learns(baseline):
    assert_it_learned(baseline, devices=1)


def test_the_hybrid_learns_on_eight_devices(hybrid):
    assert_it_learned(hybrid, devices=8)


def test_both_are_exported_evaluated_and_compared(baseline, hybrid, run_smoke):
    for name in ("export", "evaluate", "compare"):
        run_smoke(name)


def start_runner(repository, environment, run):
    folder = repository / "params" / "train_baseline"
    parameters = yaml.safe_load((folder / "smoke.yaml").read_text())
    changed = {"run": run, "checkpoint_seconds": 1.0, **BASELINE}
    (folder / f"{run}.yaml").write_text(yaml.safe_dump({**parameters, **changed}))
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


def test_a_killed_run_is_refused_and_resumes_to_the_same_metrics(baseline, repository, environment):
    killed = repository / "outputs" / "train_baseline-killed"
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
    assert figures(killed) == figures(baseline)
