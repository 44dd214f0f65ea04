# SPDX-License-Identifier: Apache-2.0
"""Measures on this machine what training costs besides the step itself.

    python -m atomic_lib.train.measure overhead      the loop around steps of about 100 ms
    python -m atomic_lib.train.measure checkpoint    writing the full training state of a model

Prints what was measured, one quantity a line; nothing is left behind.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset, open_token_folder
from atomic_lib.evidence import RunFolder
from atomic_lib.train.checkpoint import CheckpointStore, state_bytes
from atomic_lib.train.program import Program, build_program
from atomic_lib.train.session import train
from atomic_lib.train.step import TrainState

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str, str], None]

# One block of the smoke hybrid over a small vocabulary: 4 sequences of 64 tokens take about 100 ms
# a step on two cores, and the loop writes the rows of a model with every kind of mixer.
OVERHEAD_MODEL = {"vocab_size": 2048, "num_blocks": 1}
OVERHEAD_ROWS = 4


def _say(name: str, value: str) -> None:
    print(f"{name + ':':44}{value}", flush=True)


def measure_overhead(steps: int, *, say: Say = _say) -> float:
    """Trains `steps` steps by the loop and alone; returns the loop's `device_wait_fraction`.

    Alone means the compiled step again and again on one batch that lies on the device, waiting for
    each: what no loop can go below. It is timed before and after the loop, half of its steps each,
    because a machine's speed changes meanwhile.
    """
    config = TrainConfig(
        run="overhead", preset="atomic-hybrid-smoke", model=OVERHEAD_MODEL, corpus="tokens",
        sequence_length=64, batch_size=OVERHEAD_ROWS, schedule_unit="steps", max_steps=steps,
        eval_every=10 * steps, eval_batches=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        dataset = _random_tokens(Path(folder), config)
        program = build_program(config)
        rows = dataset.train_batch(
            0, 0, batch_size=config.batch_size, sequence_length=config.sequence_length
        )
        alone = _step_seconds(program, rows, steps // 2)
        run = RunFolder.open(
            Path(folder) / "overhead", notebook="train_hybrid", parameters=asdict(config),
            origins=dict.fromkeys(asdict(config), "override"), root=ROOT,
        )  # fmt: skip
        result = train(run, config, dataset)
        alone += _step_seconds(program, rows, steps - steps // 2)
        timed = [row["step_ms"] for row in run.metrics.rows() if row.get("step_ms") is not None]
    assert result.host_fraction is not None
    assert result.device_wait_fraction is not None
    say("step alone, median", f"{np.median(alone) * 1e3:.1f} ms")
    say("step in the loop, median", f"{np.median(timed):.1f} ms")
    say("host at work, by the loop", f"{result.host_fraction:.2%} of its time")
    say("device waits for the host, by the loop", f"{result.device_wait_fraction:.2%} of its time")
    return result.device_wait_fraction


def _random_tokens(folder: Path, config: TrainConfig) -> TokenDataset:
    rng = np.random.default_rng(0)
    for name, count in (("train.bin", 200_000), ("val.bin", 20_000)):
        ids = rng.integers(0, config.model_config.vocab_size, size=count)
        ids.astype("<u2").tofile(folder / name)
    return open_token_folder(folder, vocab_size=config.model_config.vocab_size)


def _step_seconds(program: Program, rows: np.ndarray, steps: int) -> list[float]:
    state, tokens = program.start(), program.placement.place_batch(rows)
    rate, seconds = jnp.float32(1e-4), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        state, metrics = program.step(state, tokens, rate)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]  # the first one compiles


def measure_checkpoint(config: TrainConfig, folder: Path, *, say: Say = _say) -> float:
    """Saves and reads back the whole state of `config` in `folder`; returns seconds lost an hour.

    The values are random, because those of a trained model do not compress either. Raises OSError
    if the disk has no room.
    """
    state = _random_state(build_program(config).abstract_state)
    store = CheckpointStore(folder=folder, config={})
    began, used = time.perf_counter(), time.process_time()
    saved = store.save(state, step=1, facts={})
    write, used = time.perf_counter() - began, time.process_time() - used
    problem = saved.problem()
    checked = time.perf_counter() - began - write
    if problem is not None:
        raise RuntimeError(f"the checkpoint that was just written is damaged: {problem}")
    lost = write * 3600 / config.checkpoint_seconds
    say("parameters", f"{config.model_config.parameter_count:,}")
    say("state (parameters, optimiser)", f"{state_bytes(state) / 1e9:.2f} GB")
    say("write, sync and hash", f"{write:.1f} s ({used:.1f} s of processor time)")
    say("check of its hashes on resume", f"{checked:.1f} s")
    say(f"training lost an hour, one each {config.checkpoint_seconds:g} s", f"{lost:.0f} s")
    return lost


def _random_state(shapes: TrainState) -> TrainState:
    rng = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(rng.standard_normal(leaf.shape, np.float32), leaf.sharding)
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, shapes)


def main(arguments: list[str] | None = None) -> None:
    """Runs one measurement."""
    parser = argparse.ArgumentParser(prog="python -m atomic_lib.train.measure")
    commands = parser.add_subparsers(dest="command", required=True)
    overhead = commands.add_parser("overhead", help="the loop around steps of about 100 ms")
    overhead.add_argument("--steps", type=int, default=200)
    checkpoint = commands.add_parser("checkpoint", help="the full training state of a model")
    checkpoint.add_argument("--preset", default="atomic-hybrid")
    checkpoint.add_argument(
        "--folder", type=Path, default=ROOT / "outputs", help="on the disk to be measured"
    )
    options = parser.parse_args(arguments)
    if options.command == "overhead":
        measure_overhead(options.steps)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure_checkpoint(TrainConfig(run="measure", preset=options.preset), Path(folder))


if __name__ == "__main__":
    main()
