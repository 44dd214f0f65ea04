# SPDX-License-Identifier: Apache-2.0
"""One process of a small training run, for test_two_processes.py.

    python one_of_many.py ROOT [STEP]

ROOT holds params/train/tiny.yaml and the tokens. The environment says which process this is. With
STEP it sends itself SIGTERM when it reads the batch of that step. The model is that of `tiny`.
"""

import os
import signal
import sys
from pathlib import Path

import tiny

from atomic_lib.data import TokenDataset, dataset
from atomic_lib.hosts import job
from atomic_lib.train import program


def main(root: str, step: str = "") -> None:
    program.model_forward = lambda *arguments: tiny.tiny_forward
    program.init_parameters = lambda config, seed: tiny.tiny_params(int(seed))
    job.check_runtime = lambda *arguments: []  # of a model that is not there
    job.require_improvement = lambda result: []  # twelve steps of it prove nothing
    read = dataset.TokenDataset.train_batch

    def train_batch(self: TokenDataset, seed: int, at: int, **sizes):
        if step and at == int(step):
            os.kill(os.getpid(), signal.SIGTERM)
        batch = read(self, seed, at, **sizes)
        print(f"batch {at}: {len(batch)} rows")
        return batch

    dataset.TokenDataset.train_batch = train_batch
    job.run_training("train/tiny", Path(root))


if __name__ == "__main__":
    main(*sys.argv[1:])
