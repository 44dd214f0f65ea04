# SPDX-License-Identifier: Apache-2.0
"""Protects a run that is spread over two processes: losses, data, evidence, checkpoints, a signal.

Oracle: the same run in one process with two devices. Both have the same mesh, parameters split over
both devices, so the same sums are formed: only the order inside a collective may differ, and with
two terms there is one. The limit, 1e-6, is float32's. The processes are real ones on this machine,
with gloo between them.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from atomic_lib.evidence import effective_rows, read_rows, verify

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 300
NUMBERS = ("step", "loss", "lr", "grad_norm", "ce")
LIMIT = 1e-6
PARAMETERS = {
    "run": "tiny", "preset": "atomic-hybrid-smoke", "model": {"vocab_size": 48, "hidden_size": 16},
    "corpus": "tokens", "compute_dtype": "float32", "sequence_length": 12, "batch_size": 4,
    "fsdp": 2, "dropout_rate": 0.25, "schedule_unit": "steps", "max_steps": 12, "warmup_steps": 3,
    "learning_rate": 0.01, "eval_every": 5, "budget_seconds": 900, "checkpoint_seconds": 1.0e+9,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    rng = np.random.default_rng(7)
    (folder / "tokens").mkdir()
    for name, count in (("train.bin", 2000), ("val.bin", 400)):
        rng.integers(0, 48, size=count).astype("<u2").tofile(folder / "tokens" / name)
    return folder


def repository(base: Path, name: str) -> Path:
    """A root of its own, as run_training wants it."""
    root = base / name
    (root / "params" / "train").mkdir(parents=True)
    (root / "params" / "train" / "tiny.yaml").write_text(yaml.safe_dump(PARAMETERS))
    (root / "requirements.txt").write_text("numpy\n")
    shutil.copytree(base / "tokens", root / "tokens")
    return root


def start(root: Path, *arguments: str, devices: int = 1, **cluster: str) -> subprocess.Popen:
    environment = {
        **os.environ,
        **cluster,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(root.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "train", HERE))),
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / "one_of_many.py"), str(root), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_two(root: Path, *stop_at: str) -> list[tuple[int, str]]:
    """Exit codes and outputs of two processes; the second gets `stop_at`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        start(root, *(stop_at if number else ()), JAX_COORDINATOR_ADDRESS=address,
              JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(number))
        for number in range(2)
    ]  # fmt: skip
    try:
        return [(p.communicate(timeout=SECONDS)[0], p.returncode)[::-1] for p in processes]
    finally:
        for process in processes:
            process.kill()


def numbers(folder: Path) -> list[dict]:
    rows = effective_rows(read_rows(folder / "metrics.jsonl"))
    rows = [row for row in rows if row["kind"] in ("train", "eval")]
    return [{name: row[name] for name in NUMBERS if name in row} for row in rows]


def assert_same(found: list[dict], wanted: list[dict]) -> None:
    assert [sorted(row) for row in found] == [sorted(row) for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(row[name], value, rtol=LIMIT, err_msg=f"{name} of {other}")


def test_two_processes_give_the_losses_of_one_and_resume_in_one(base):
    whole = repository(base, "whole")
    one = start(whole, devices=2)
    assert (one.communicate(timeout=SECONDS)[0], one.returncode)[1] == 0
    wanted = numbers(whole / "outputs" / "train-tiny")
    assert [row["step"] for row in wanted if "loss" in row] == list(range(1, 13))

    # The second process is asked to stop; both do, at the same step, and both write its state.
    root = repository(base, "two")
    folder = root / "outputs" / "train-tiny"
    for code, output in run_two(root, "7"):
        assert code == 1, output
        assert "TrainingInterrupted: SIGTERM stopped training at step" in output, output
    (checkpoint,) = folder.glob("checkpoints/step_*")
    stopped = json.loads((checkpoint / "commit.json").read_text())["step"]
    assert 6 <= stopped <= 8
    assert verify(folder)[0].startswith("FAILED.json: the run failed: TrainingInterrupted")

    # They go on together to the end.
    outcomes = run_two(root)
    for code, output in outcomes:
        assert code == 0, output
        # Each process reads its own half of every batch of four.
        assert set(re.findall(r"batch \d+: (\d) rows", output)) == {"2"}
    assert_same(numbers(folder), wanted)
    assert verify(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["devices"]["process_count"] == 2
    assert sorted(path.name for path in (root / "outputs").iterdir()) == ["train-tiny"]
    events = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "event"]
    assert [row["step"] for row in events if row["event"] == "resume"] == [stopped]
