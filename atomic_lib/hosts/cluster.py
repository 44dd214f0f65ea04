# SPDX-License-Identifier: Apache-2.0
"""Which process this is among how many, decided from what launchers put in the environment.

    plain      JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID or, in an indexed
               Kubernetes job (JobSet), JOB_COMPLETION_INDEX
    SkyPilot   SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK
    SLURM      the variables of a step: srun sets them, an allocation alone does not
    TPU slice  TPU_WORKER_HOSTNAMES, TPU_WORKER_ID (GKE sets them), with MEGASCALE_* for several
               slices

The first that is there counts. Ray Train's JaxTrainer has joined the processes before our code
runs, which `processes.join_cluster` sees; it sets no such variable.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

PORT = 8476  # JAX's own choice for its coordinator
# SLURM shares hosts between jobs, so each job gets a port of its own out of these.
SLURM_PORTS = range(61_440, 65_536)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What `jax.distributed.initialize` is told. coordinator: "<host>:<port>" of process 0."""

    launcher: str
    coordinator: str
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None  # None: all that the host has

    def __post_init__(self):
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"{self.launcher}: process {self.process} is not one of {self.processes}, which "
                "are counted from 0"
            )


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment describes, or None for a process on its own.

    Raises ValueError, naming the variable, where a description is incomplete or is no number.
    """
    for look in (_plain, _skypilot, _slurm, _tpu_slice):
        cluster = look(environment)
        if cluster is not None:
            return cluster if cluster.processes > 1 else None
    return None


def _number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = environment.get(name, "")
    if not text.strip().isdigit():
        raise ValueError(f"{launcher}: {name} must be a whole number, got {text!r}")
    return int(text)


def _plain(environment: Mapping[str, str]) -> Cluster | None:
    address, count = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"
    if address not in environment and count not in environment:
        return None
    number = "JAX_PROCESS_ID"
    if number not in environment and "JOB_COMPLETION_INDEX" in environment:
        number = "JOB_COMPLETION_INDEX"
    for name in (address, count, number):
        if not environment.get(name):
            raise ValueError(
                f"plain variables: {name} is not set; a process needs {address}, {count} and "
                "JAX_PROCESS_ID (or JOB_COMPLETION_INDEX)"
            )
    return Cluster(
        launcher="plain variables",
        coordinator=_with_port(environment[address]),
        processes=_number(environment, count, "plain variables"),
        process=_number(environment, number, "plain variables"),
    )


def _skypilot(environment: Mapping[str, str]) -> Cluster | None:
    hosts = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not hosts:
        return None
    return Cluster(
        launcher="SkyPilot",
        coordinator=_with_port(hosts[0]),
        processes=_number(environment, "SKYPILOT_NUM_NODES", "SkyPilot"),
        process=_number(environment, "SKYPILOT_NODE_RANK", "SkyPilot"),
    )


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None
    job = _number(environment, "SLURM_JOB_ID", "SLURM")
    first = _first_slurm_host(environment["SLURM_STEP_NODELIST"])
    a_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    local = None
    if a_node and int(a_node[0]) > 1:  # one process a device
        local = (_number(environment, "SLURM_LOCALID", "SLURM"),)
    return Cluster(
        launcher="SLURM",
        coordinator=f"{first}:{SLURM_PORTS[job % len(SLURM_PORTS)]}",
        processes=_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM"),
        process=_number(environment, "SLURM_PROCID", "SLURM"),
        local_devices=local,
    )


def _first_slurm_host(nodes: str) -> str:
    """The first host of a compressed list: "gpu[07-09,12],login1" -> "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM: SLURM_STEP_NODELIST names no host: {nodes!r}")
    return "".join(part or "" for part in match.groups())


def _tpu_slice(environment: Mapping[str, str]) -> Cluster | None:
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    if len(hosts) * slices <= 1:  # a slice of one host, such as Kaggle's v5e-8
        return None
    worker = _number(environment, "TPU_WORKER_ID", "TPU slice")
    first, index = hosts[0], 0
    if slices > 1:
        first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "")
        if not first:
            raise ValueError("TPU slice: MEGASCALE_COORDINATOR_ADDRESS is not set for many slices")
        index = _number(environment, "MEGASCALE_SLICE_ID", "TPU slice")
    return Cluster(
        launcher="TPU slice",
        coordinator=f"{first.rsplit(':', 1)[0]}:{PORT}",
        processes=len(hosts) * slices,
        process=worker + index * len(hosts),
    )


def _with_port(address: str) -> str:
    return address if re.search(r":\d+$", address) else f"{address}:{PORT}"
