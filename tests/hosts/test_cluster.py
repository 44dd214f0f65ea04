# SPDX-License-Identifier: Apache-2.0
"""Protects how a process finds its place in a run: a test a launcher, from the variables it sets.

Oracle: the environments are written by hand as the launchers document them. A pure function, so no
cluster is needed.
"""

import pytest

from atomic_lib.hosts import Cluster, find_cluster

PLAIN = {"JAX_COORDINATOR_ADDRESS": "host0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
JOBSET = {
    "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train", "JAX_NUM_PROCESSES": "2",
    "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.1.0.2\n10.1.0.3\n", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}  # fmt: skip
ALLOCATION = {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-10]"}
SLURM = ALLOCATION | {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-10]", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "2"}
SLICES = SLICE | {
    "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "t-0.t:8080",
}  # fmt: skip


def cluster(launcher, coordinator, processes, process, local_devices=None):
    return Cluster(
        launcher=launcher, coordinator=coordinator, processes=processes, process=process,
        local_devices=local_devices,
    )  # fmt: skip


CASES = {
    "plain": (PLAIN, cluster("plain variables", "host0:1234", 4, 3)),
    "jobset": (JOBSET, cluster("plain variables", "train-workers-0-0.train:8476", 2, 1)),
    "skypilot": (SKYPILOT, cluster("SkyPilot", "10.1.0.2:8476", 2, 1)),
    "slurm, a process a node": (SLURM, cluster("SLURM", "gpu07:61441", 4, 2)),
    "slurm, a process a device": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
        cluster("SLURM", "gpu07:61441", 4, 2, (1,)),
    ),
    "tpu slice": (SLICE, cluster("TPU slice", "t-0.t:8476", 4, 2)),
    "tpu slices": (SLICES, cluster("TPU slice", "t-0.t:8476", 8, 6)),
    "plain before the slice": (SLICE | PLAIN, cluster("plain variables", "host0:1234", 4, 3)),
    # No process but this one.
    "nothing": ({}, None),
    "kaggle": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    "one node": (SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, None),
    "an allocation without srun": (ALLOCATION, None),
    "ray": ({"RAY_JOB_ID": "02000000", "TPU_VISIBLE_CHIPS": "0,1,2,3"}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_process_finds_its_place(name):
    environment, wanted = CASES[name]
    assert find_cluster(environment) == wanted


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-010,12],login", "gpu007"),
        ("rack[3,5]-gpu", "rack3-gpu"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    found = find_cluster(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found.coordinator.split(":")[0] == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES is not set"),
        ({k: v for k, v in PLAIN.items() if k != "JAX_PROCESS_ID"}, "JAX_PROCESS_ID is not set"),
        (PLAIN | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID must be a whole number, got 'first'"),
        (PLAIN | {"JAX_PROCESS_ID": "4"}, "process 4 is not one of 4"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK must be a whole number"),
        (SLICE | {"TPU_WORKER_ID": ""}, "TPU_WORKER_ID must be a whole number"),
        (SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS is not"),
    ],
)
def test_a_description_that_is_not_whole_is_named(environment, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(environment)
