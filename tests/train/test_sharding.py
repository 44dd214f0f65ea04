# SPDX-License-Identifier: Apache-2.0
"""Protects that the result of a step does not depend on how the batch and parameters are spread.

Oracle: the same step on one device, of the same process. 8 fake CPU devices; data parallel, fully
sharded and mixed meshes, one of them with gradient accumulation, all with dropout (its masks must
not move) and document boundaries (the devices hold different numbers of targets). A run that is
resumed on other devices is compared with the one that was not, in the same way; on the same
devices, bit for bit. Tolerance: sums over the batch come in another order, a few float32 roundings:
2e-6 of the largest entry for gradients; three Muon steps magnify that by at most ten.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MESHES = ["8x1", "1x8", "2x4", "4x2"]
GRADIENT_LIMIT = 2e-6
PARAMETER_LIMIT = 2e-5


def run_on_eight_devices(script, *arguments):
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs():
    return run_on_eight_devices("eight_devices.py")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_on_eight_devices("device_change.py", tmp_path_factory.mktemp("devices"))


def assert_close(name, found, wanted, limit):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, name
    assert np.isfinite(found).all(), name
    error = np.abs(found - wanted)
    worst = np.unravel_index(error.argmax(), error.shape)
    bound = limit * np.abs(wanted).max()
    assert error[worst] <= bound, f"{name}{worst}: {found[worst]} against {wanted[worst]}"


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_gives_the_single_device_result(runs, mesh):
    found, wanted = runs[mesh], runs["1x1"]
    for name, gradient in wanted["gradients"].items():
        assert_close(f"gradient {name}", found["gradients"][name], gradient, GRADIENT_LIMIT)
    assert_close("gates", found["gates"], wanted["gates"], GRADIENT_LIMIT)
    assert_close("losses", found["losses"], wanted["losses"], PARAMETER_LIMIT)
    for name, value in wanted["params"].items():
        assert_close(f"parameter {name}", found["params"][name], value, PARAMETER_LIMIT)
    for name, value in wanted["sums"].items():
        assert_close(f"evaluation {name}", found["sums"][name], value, PARAMETER_LIMIT)


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_matrices_are_really_split(runs, mesh):
    split = {name for name, spec in runs[mesh]["shards"].items() if "fsdp" in spec}
    matrices = {name for name in runs[mesh]["params"] if not name.endswith("scale")}
    assert split == matrices
    assert not any("fsdp" in spec for spec in runs["8x1"]["shards"].values())


def test_training_moves_the_loss(runs):
    assert runs["1x1"]["losses"][0] > np.log(48) - 1
    assert len(set(runs["1x1"]["losses"])) == 3


def test_resuming_on_the_same_devices_changes_no_bit(resumed):
    assert resumed["8"]["resumed_from"] == 5
    assert resumed["8"]["numbers"] == resumed["whole"]["numbers"]
    assert resumed["8"]["state"] == resumed["whole"]["state"]
    assert len(resumed["whole"]["state"]) > 8


@pytest.mark.parametrize("devices", ["4", "1"])
def test_resuming_on_other_devices_changes_only_rounding(resumed, devices):
    """Sharded parameters, two slices a step and dropout before; another spread of all after."""
    found, wanted = resumed[devices]["numbers"], resumed["whole"]["numbers"]
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    earlier = [row for row in wanted if row["step"] <= resumed[devices]["resumed_from"]]
    assert found[: len(earlier)] == earlier, "what came before the resume is the same record"
    for name in ("loss", "grad_norm", "lr", "ce"):
        assert_close(
            name,
            [row[name] for row in found if name in row],
            [row[name] for row in wanted if name in row],
            PARAMETER_LIMIT,
        )
    assert resumed[devices]["state"] != resumed["whole"]["state"], "it was really another mesh"
