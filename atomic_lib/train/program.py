# SPDX-License-Identifier: Apache-2.0
"""Everything that is compiled for one run, made from its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from atomic_lib.config import TrainConfig
from atomic_lib.data.segments import segment_ids_from_tokens
from atomic_lib.model import Execution, bind_parameters, init_parameters, model_graph
from atomic_lib.train.optimizer import Optimizer, Params
from atomic_lib.train.sharding import Placement
from atomic_lib.train.step import Forward, TrainState, TrainStep, initial_state, make_eval_step

# What a resumed run may change: names, limits, and how the same numbers are computed. Everything
# else decides what is learned. A limit counts where the schedule runs towards it.
FREE_TO_CHANGE = {
    "run",
    "preset",  # "architecture" holds what it stands for
    "model",
    "corpus",  # "data" holds the hashes of its files
    "accelerator",
    "kernel_backend",
    "accumulate_steps",
    "checkpoint_seconds",
    "keep_checkpoints",
    "loss_chunks",
    "data_parallel",
    "fsdp",
    "max_skipped_in_a_row",
    "resume_from",
    "replay",
    "trackers",
    "profile_steps",
}
HORIZONS = {"time": "budget_seconds", "steps": "max_steps", "tokens": "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The compiled functions of a run, and how its state begins.

    `step` and `evaluate` are those of `step.py`; `start` makes the first state, in place on the
    devices; `abstract_state` is its shapes and shardings.
    """

    placement: Placement
    optimizer: Optimizer
    step: Any
    evaluate: Any
    start: Any
    abstract_state: TrainState


def execution_on(config: TrainConfig, platform: str) -> Execution:
    """How the model is computed on `platform`: the platform compiled for, not this process's."""
    backend = config.kernel_backend
    if platform != "tpu":
        return Execution(compute_dtype=config.compute_dtype, gdn2_backend=backend)
    # These kernels read whole lanes of 128 channels.
    model = config.model_config
    by_lanes = "tpu" if model.hidden_size % 128 == 0 else "xla"
    return Execution(
        compute_dtype=config.compute_dtype,
        gdn2_backend="tpu" if backend == "auto" else backend,
        attention="splash",
        depth_routing=by_lanes,
        norms=by_lanes if model.head_dim % 128 == 0 else "xla",
    )


def model_forward(config: TrainConfig, platform: str | None = None) -> Forward:
    """The model of `config` as a function of its parameters, for `platform` (default: JAX's).

    With a document separator a token sees only what its own document holds of the window.
    """
    execution = execution_on(config, platform or jax.default_backend())
    graph = model_graph(config.model_config, execution)
    rate, separator = config.dropout_rate, config.document_separator

    def forward(params: Params, tokens: Array, dropout_keys: Array | None):
        model = bind_parameters(graph, params)
        segments = None if separator is None else segment_ids_from_tokens(tokens, separator)
        hidden, _, gates = model.observed(
            tokens, segment_ids=segments, dropout_keys=dropout_keys, dropout_rate=rate
        )
        return hidden, model.output_embedding(), gates

    return forward


def build_program(config: TrainConfig, *, devices: Sequence[Any] | None = None) -> Program:
    """Places and compiles (on first use) everything that `config` needs.

    `devices` default to all of this machine's; others may be those of a topology that one compiles
    for. Raises ValueError if the batch or the mesh does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    config.require_devices(len(devices))
    placement = Placement.over(
        data_parallel=config.data_parallel, fsdp=config.fsdp, devices=devices
    )
    optimizer = Optimizer(
        kind=config.optimizer,
        weight_decay=config.weight_decay,
        decay_groups=config.decay_groups,
        clip_norm=config.clip_norm,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        placement=placement,
        exchange_dtype=jnp.dtype(config.compute_dtype),
    )
    forward = model_forward(config, placement.platform)
    train_step = TrainStep(
        forward=forward,
        optimizer=optimizer,
        placement=placement,
        accumulate_steps=config.accumulate_steps,
        loss_chunks=config.loss_chunks,
        dropout_seed=config.dropout_seed if config.dropout_rate > 0 else None,
        document_separator=config.document_separator,
        matrix_dtype=config.compute_dtype,
    )

    def first_state() -> TrainState:
        return initial_state(init_parameters(config.model_config, config.init_seed), optimizer)

    shapes = jax.eval_shape(first_state)
    shardings = placement.of(shapes)
    return Program(
        placement=placement,
        optimizer=optimizer,
        step=train_step.compiled(),
        evaluate=make_eval_step(
            forward, placement, config.loss_chunk_tokens, config.document_separator
        ),
        start=jax.jit(first_state, out_shardings=shardings),
        abstract_state=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        ),
    )


def resume_config(config: TrainConfig, dataset_manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must agree on."""
    free = FREE_TO_CHANGE | (set(HORIZONS.values()) - {HORIZONS[config.schedule_unit]})
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in free}
    files = {
        split: [facts["hash"] for facts in dataset_manifest[split]]
        for split in ("train", "validation")
    }
    return {**values, "architecture": config.model_config.to_dict(), "data": files}
