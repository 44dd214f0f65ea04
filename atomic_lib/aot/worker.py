# SPDX-License-Identifier: Apache-2.0
"""The child process of `compile_report`: compiles a run's programs for a TPU slice.

Run as `python -m atomic_lib.aot.worker REQUEST FOLDER`. The request is JSON: the training
configuration, the slice and the programs wanted. Each program leaves NAME.hlo.txt and NAME.json in
the folder. libtpu and jax read their environment once, so the parent sets it and this process is
its own.
"""

import json
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

from atomic_lib.aot.target import Target
from atomic_lib.config import TrainConfig

PROGRAMS = ("train", "eval")


def topology_devices(target: Target) -> list[Any]:
    """The devices of the slice, as the compiler describes them; none of them need exist."""
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        target.topology, "tpu", chips_per_host_bounds=[*target.host_grid, 1]
    )
    return list(description.devices)


def compile_program(config: TrainConfig, target: Target, name: str) -> tuple[dict[str, Any], str]:
    """Returns the facts of one compiled program ("train" or "eval") and its HLO text."""
    import jax
    import jax.numpy as jnp

    from atomic_lib.train.program import build_program

    # Where a kernel was called from is part of its code otherwise, and equal kernels would differ.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    program = build_program(config, devices=topology_devices(target))
    placement, state = program.placement, program.abstract_state

    def array(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arguments: tuple[Any, ...]
    sequences = config.batch_size
    if name == "eval":
        sequences = config.eval_batch_size or config.batch_size
    tokens = array((sequences, config.sequence_length + 1), jnp.int32, placement.batch)
    if name == "train":
        function = program.step
        arguments = (state, tokens, array((), jnp.float32, placement.replicated))
    else:
        function = program.evaluate
        vocabulary = (config.model_config.vocab_size,)
        arguments = (state.params, tokens, array(vocabulary, jnp.int32, placement.replicated))
    started = time.monotonic()
    lowered = function.lower(*arguments)
    lowered_at = time.monotonic()
    compiled = lowered.compile()
    facts = {
        "lowering_seconds": lowered_at - started,
        "compile_seconds": time.monotonic() - lowered_at,
        "memory": _memory(compiled.memory_analysis()),
        "parameter_bytes": _chip_bytes(state.params),
        "optimizer_bytes": _chip_bytes(state.optimizer) if name == "train" else 0,
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "device_kind": placement.mesh.devices.flat[0].device_kind,
        "jax_version": jax.__version__,
    }
    return facts, compiled.as_text()


def _memory(analysis: Any) -> dict[str, int]:
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}


def _chip_bytes(tree: Any) -> int:
    """Bytes of one chip's shards of abstract arrays, without the padding of their layout."""
    import jax

    total = 0
    for leaf in jax.tree.leaves(tree):
        size = leaf.dtype.itemsize
        for axis in leaf.sharding.shard_shape(leaf.shape):
            size *= axis
        total += size
    return total


def main(request_path: str, folder: str) -> int:
    """Compiles each program asked for; an error becomes NAME.json with "error"."""
    request = json.loads(Path(request_path).read_text())
    known = {field.name for field in fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in request["config"].items() if k in known})
    target = Target(topology=request["topology"])
    for name in request["programs"]:
        print(f"compiling {name}", flush=True)
        try:
            facts, text = compile_program(config, target, name)
            (Path(folder) / f"{name}.hlo.txt").write_text(text)
        # Whatever the compiler or the model raises is reported by the parent.
        except Exception as error:
            facts = {"error": str(error), "traceback": traceback.format_exc()}
        (Path(folder) / f"{name}.json").write_text(json.dumps(facts))
        if "error" in facts:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
