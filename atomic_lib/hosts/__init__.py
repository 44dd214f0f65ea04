# SPDX-License-Identifier: Apache-2.0
"""Runs that are spread over several processes, on one host or on many. Free of JAX at import.

    cluster     which process this is, and where the first one is, from environment variables
    processes   joining the others, and what all of them must agree on
    job         a training run without a notebook: `python -m atomic_lib.hosts train/<run>`

Every process runs the same program on its own devices and reads its own rows of each batch. What
depends on a clock, a signal or a disk is decided by the first process (a signal by any) and told to
the others. The first process alone leaves evidence; checkpoints are written by all, to a file
system that all of them see.
"""

from atomic_lib.hosts.cluster import Cluster, find_cluster

__all__ = ["Cluster", "find_cluster"]
