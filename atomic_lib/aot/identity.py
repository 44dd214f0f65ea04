# SPDX-License-Identifier: Apache-2.0
"""Which training configurations compile to the same program, so that one report speaks for all."""

from dataclasses import fields
from typing import Any

from atomic_lib.config import TrainConfig
from atomic_lib.evidence.files import plain

# Names, data, seeds, rates and limits: numbers that a program is given or that decide how often it
# runs. A field that is not listed here counts as part of the program.
NOT_COMPILED = frozenset(
    (
        "run", "preset", "model", "corpus", "accelerator", "init_seed", "data_seed", "dropout_seed",
        "dropout_rate", "learning_rate", "weight_decay", "clip_norm", "adam_b1", "adam_b2",
        "schedule", "schedule_unit", "warmup_steps", "budget_seconds", "max_steps", "max_tokens",
        "decay_fraction", "floor_fraction", "eval_every", "eval_batches", "checkpoint_seconds",
        "keep_checkpoints",
    )
)  # fmt: skip


def program_identity(config: TrainConfig) -> dict[str, Any]:
    """What decides the compiled steps of `config`, as JSON has it: equal for equal programs."""
    compiled = {f.name: getattr(config, f.name) for f in fields(config)}
    return plain(
        {
            **{name: value for name, value in compiled.items() if name not in NOT_COMPILED},
            "architecture": config.model_config.to_dict(),
            "dropout": config.dropout_rate > 0,
        }
    )
