# SPDX-License-Identifier: Apache-2.0
"""The real training step, compiled for this machine's devices: how long it takes, what it holds."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from atomic_lib.config import TrainConfig
from atomic_lib.evidence import RunFolder
from atomic_lib.train.program import build_program

COMPILED_STEP = "compiled-step.json"


def compile_training_step(run: RunFolder, config: TrainConfig) -> list[dict[str, Any]]:
    """Compiles the step, optimiser included, and writes compiled-step.json.

    Returns table rows: compile time in seconds and memory in GB a device, as the compiler states
    it. Allocates nothing. Raises ValueError if the batch or the mesh does not fit the devices.
    """
    with run.recording():
        run.progress("compile", 0, 0, "compiling the training step")
        program = build_program(config)
        tokens = jax.ShapeDtypeStruct(
            (config.batch_size, config.sequence_length + 1),
            jnp.int32,
            sharding=program.placement.batch,
        )
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        began = time.monotonic()
        compiled = program.step.lower(program.abstract_state, tokens, rate).compile()
        seconds = time.monotonic() - began
        memory = compiled.memory_analysis()
        facts = {
            "compile_seconds": seconds,
            "devices": len(program.placement.mesh.devices.flat),
            "state_and_batch_gb": memory.argument_size_in_bytes / 1e9,
            "temporaries_gb": memory.temp_size_in_bytes / 1e9,
            "tokens_per_step": config.tokens_per_step,
            "model_tflop_per_step": config.tokens_per_step
            * config.model_config.flops_per_token(config.sequence_length)
            / 1e12,
        }
        run.write_json(COMPILED_STEP, facts)
    return [{"quantity": name.replace("_", " "), "value": value} for name, value in facts.items()]
