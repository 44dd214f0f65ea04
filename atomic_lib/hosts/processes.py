# SPDX-License-Identifier: Apache-2.0
"""Joining the processes of a run, and what they must agree on.

A run on one process pays nothing for this: every function returns at once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from atomic_lib.hosts.cluster import Cluster, find_cluster

Result = TypeVar("Result")


class OtherProcessError(RuntimeError):
    """Another process of this run failed where this one did not."""


def join_cluster(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Joins the run's other processes, if the environment names any; returns what it found.

    To be called before JAX's backend starts. A launcher that has joined them already (Ray Train)
    is left alone, and then the result is None. Waits up to 5 minutes for the others.
    """
    if jax.distributed.is_initialized():
        return None
    cluster = find_cluster(environment)
    if cluster is not None:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.processes,
            process_id=cluster.process,
            local_device_ids=cluster.local_devices,
        )
    return cluster


def is_first() -> bool:
    """Whether this process is the one that leaves evidence."""
    return jax.process_index() == 0


def gather(values: Sequence[float]) -> NDArray[np.float64]:
    """The values of every process, float64 [processes, n]; every process must call this."""
    mine = np.array(values, np.float64)
    if jax.process_count() == 1:
        return mine[None]
    # As bytes: JAX would round float64 to float32, and an elapsed time must come back as it was.
    rows = np.asarray(multihost_utils.process_allgather(mine.view(np.uint8)))
    return rows.reshape(jax.process_count(), -1).view(np.float64)


def together(action: Callable[[], Result], what: str, *, first_only: bool = False) -> Result | None:
    """Runs `action` in every process (or the first alone) and tells all whether it succeeded.

    Returns its result, None in a process that did not run it. A failure is raised as it is where
    it happened, and as OtherProcessError, an OSError if it was one there, everywhere else, so that
    all processes take the same way on.
    """
    result: Result | None = None
    failure: BaseException | None = None
    try:
        if is_first() or not first_only:
            result = action()
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        kinds = gather([0.0 if failure is None else 1.0 if isinstance(failure, OSError) else 2.0])
        failed = np.flatnonzero(kinds[:, 0])
        if failure is None and failed.size:
            message = f"process {failed[0]} could not {what}; its own log says why"
            kind = OSError if np.all(kinds[failed, 0] == 1.0) else OtherProcessError
            raise kind(message)
    if failure is not None:
        raise failure
    return result


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
