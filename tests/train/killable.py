# SPDX-License-Identifier: Apache-2.0
"""Trains a small hybrid in a process of its own, which may be killed: see test_real_model.py.

    python killable.py TOKENS RUN [SIGNAL STEP]

SIGNAL is sent to this process when the batch of STEP is read.
"""

import os
import signal
import sys
from pathlib import Path

from tiny_runs import SETTINGS, open_run

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset, open_token_folder
from atomic_lib.train import train

MODEL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "ffn_size": 32,
    "num_blocks": 1,
    "block": ("gdn2", "mla"),
    "num_heads": 1,
    "head_dim": 16,
    "attention_heads": 1,
    "mla_latent_dim": 16,
    "mla_content_dim": 8,
    "mla_rotary_dim": 8,
    "mla_value_dim": 16,
}


class Killing:
    """A dataset that sends this process a signal when the batch of one step is read."""

    def __init__(self, dataset: TokenDataset, number: int, step: int):
        self._dataset, self._number, self._step = dataset, number, step

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def train_batch(self, seed, step, **sizes):
        if step == self._step:
            os.kill(os.getpid(), self._number)
        return self._dataset.train_batch(seed, step, **sizes)


def main(tokens: str, run_path: str, *kill: str) -> None:
    dataset = open_token_folder(Path(tokens), vocab_size=MODEL["vocab_size"])
    if kill:
        dataset = Killing(dataset, signal.Signals[kill[0]], int(kill[1]))
    changes = {"model": MODEL, "accumulate_steps": 2, "checkpoint_seconds": 1e-9}
    config = TrainConfig(**{**SETTINGS, **changes})
    run = open_run(Path(run_path), config)
    result = train(run, config, dataset)
    run.succeed(**result.summary())


if __name__ == "__main__":
    main(*sys.argv[1:])
