# SPDX-License-Identifier: Apache-2.0
"""Trains params/train/ray_train.yaml on the hosts of a TPU slice: see ray_train.md.

    python docs/many_hosts/ray_train.py

The repository is at the same place on every node, and its outputs/ is on a shared file system.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def train_one_process() -> None:
    """Runs in each worker, after JaxTrainer has joined them with jax.distributed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from atomic_lib.hosts.job import run_training

    run_training("train/ray_train", ROOT)


def main() -> None:
    """Starts one worker a host and waits for them."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    trainer = JaxTrainer(
        train_loop_per_worker=train_one_process,
        scaling_config=ScalingConfig(
            use_tpu=True,
            num_workers=4,
            topology="4x4",
            accelerator_type="TPU-V6E",
            resources_per_worker={"TPU": 4},
        ),
        # A worker that dies starts all of them again; they resume from the newest checkpoint.
        run_config=RunConfig(name="atomic", failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
