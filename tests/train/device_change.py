# SPDX-License-Identifier: Apache-2.0
"""Trains on 8 devices, dies, and goes on with 8, 4 and 1; prints what came out, as JSON.

A process of its own, because the number of fake devices is fixed when jax starts.

    python device_change.py FOLDER
"""

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import jax
import tiny
from tiny_runs import (
    EVERY_STEP,
    Faulty,
    PulledPlug,
    last_state,
    make_config,
    numbers,
    open_run,
    write_tokens,
)

from atomic_lib.data import open_token_folder
from atomic_lib.evidence.verify import sha256_bytes
from atomic_lib.train import program, train

SETTINGS = {
    "batch_size": 16,
    "max_steps": 8,
    "eval_every": 4,
    "compute_dtype": "float32",
    **EVERY_STEP,
}
EIGHT = {"data_parallel": 4, "fsdp": 2, "accumulate_steps": 2}
RESUMED_ON = {
    "8": EIGHT,
    "4": {"data_parallel": 1, "fsdp": 4, "accumulate_steps": 2},
    "1": {"data_parallel": 1, "fsdp": 1, "accumulate_steps": 1},
}
DIES_AT = 6


def main(base: Path) -> dict:
    """Numbers of the whole run and of each resumed one, and digests of their last arrays."""
    dataset = open_token_folder(write_tokens(base / "tokens"), vocab_size=tiny.VOCABULARY)
    config = make_config(**SETTINGS, **EIGHT)
    train(open_run(base / "whole" / "run", config), config, dataset)
    with suppress(PulledPlug):
        train(open_run(base / "dead" / "run", config), config, Faulty(dataset, DIES_AT))
    found = {"whole": outcome(base / "whole" / "run", config, dataset)}
    for name, mesh in RESUMED_ON.items():
        path = shutil.copytree(
            base / "dead" / "run", base / name / "run", ignore=shutil.ignore_patterns(".lock")
        )
        config = make_config(**SETTINGS, **mesh)
        result = train(open_run(path, config), config, dataset)
        found[name] = {
            "resumed_from": result.resumed_from_step,
            **outcome(path, config, dataset),
        }
    return found


def outcome(path, config, dataset) -> dict:
    state = last_state(path, config, dataset)
    return {
        "numbers": numbers(path),
        "state": {name: sha256_bytes(data) for name, (_, _, data) in state.items()},
    }


if __name__ == "__main__":
    assert jax.device_count() == 8
    program.model_forward = lambda *arguments: tiny.tiny_forward
    program.init_parameters = lambda config, seed: tiny.tiny_params(int(seed))
    output = sys.stdout
    sys.stdout = sys.stderr  # what training says is not the result
    result = main(Path(sys.argv[1]))
    json.dump(result, output)
