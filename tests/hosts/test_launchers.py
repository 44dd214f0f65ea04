# SPDX-License-Identifier: Apache-2.0
"""Protects the launchers' files in docs/many_hosts: what they start exists and finds its place.

Oracle: the files themselves, read as their launchers read them (YAML, Python), and the environment
that a launcher adds, written by hand.
"""

import ast
from pathlib import Path

import pytest
import yaml

from atomic_lib.config import load_config
from atomic_lib.hosts import find_cluster

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "many_hosts"
DEVICES = {"gke_jobset": 16, "skypilot": 16, "ray_train": 16}


@pytest.mark.parametrize("run", DEVICES)
def test_each_launcher_has_a_page_and_parameters_that_fit_its_devices(run):
    config = load_config("train", {"run": run}, root=ROOT).config
    config.require_devices(DEVICES[run])
    assert config.accelerator is not None
    page = (PAGES / f"{run}.md").read_text()
    assert f"`params/train/{run}.yaml`" in page
    assert "**Not run here**" in page


def test_a_pod_of_the_jobset_finds_its_place():
    manifest = yaml.safe_load((PAGES / "gke_jobset.yaml").read_text())
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][1:] == ["-m", "atomic_lib.hosts", "train/gke_jobset"]
    hosts, chips = job["completions"], container["resources"]["limits"]["google.com/tpu"]
    assert hosts * chips == DEVICES["gke_jobset"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    cluster = find_cluster({**variables, "JOB_COMPLETION_INDEX": "3"})
    assert (cluster.processes, cluster.process) == (hosts, 3)
    name, subdomain = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    assert cluster.coordinator == f"{name}-{workers['name']}-0-0.{subdomain}:8476"


def test_the_skypilot_task_starts_its_parameter_file_on_its_nodes():
    task = yaml.safe_load((PAGES / "skypilot.yaml").read_text())
    assert task["run"].split()[-3:] == ["-m", "atomic_lib.hosts", "train/skypilot"]
    for count in task["resources"]["accelerators"].values():
        assert task["num_nodes"] * count == DEVICES["skypilot"]


def test_the_ray_script_trains_its_parameter_file_in_every_worker():
    tree = ast.parse((PAGES / "ray_train.py").read_text())
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert ast.literal_eval(calls["run_training"].args[0]) == "train/ray_train"
    scaling = {key.arg: key.value for key in calls["ScalingConfig"].keywords}
    workers = ast.literal_eval(scaling["num_workers"])
    chips = ast.literal_eval(scaling["resources_per_worker"])["TPU"]
    assert workers * chips == DEVICES["ray_train"]
