# SPDX-License-Identifier: Apache-2.0
"""A model's parameters against the validation split, by the trainer's own evaluation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.train.evaluation import Validation
from atomic_lib.train.program import model_forward
from atomic_lib.train.sharding import Placement
from atomic_lib.train.step import make_eval_step

# (batches done, batches in all)
Progress = Callable[[int, int], None]


def evaluate_parameters(
    parameters: Mapping[str, ArrayLike],
    training: TrainConfig,
    dataset: TokenDataset,
    *,
    batch_size: int,
    batches: int | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluates the first `batches` (None: all full ones) batches of the validation split.

    Model, dtype, sequence length and loss are those of `training`; the batch is spread over as many
    of this machine's devices as divide it. Returns the fields of an evaluation row: ce (nats a
    target), bpb_est, bpb_exact, bytes, exact_nats (these three None where the tokenizer is not
    known), target_tokens, batches, and by_length where `training` has eval_lengths; and
    position_nats float64 [sequence_length], the mean cross-entropy of the targets at each position
    (with t + 1 tokens of context, fewer where documents are kept apart; NaN where no target
    counts). Raises ValueError if the split has no full batch.
    """
    shares = _devices_for(batch_size)
    config = dataclasses.replace(
        training, batch_size=batch_size, eval_batch_size=None, eval_batches=batches,
        accumulate_steps=1, data_parallel=shares, fsdp=1,
    )  # fmt: skip
    placement = Placement.over(data_parallel=shares, fsdp=1)
    step = make_eval_step(
        model_forward(config), placement, config.loss_chunk_tokens, config.document_separator
    )
    validation = Validation.of(config, dataset, placement, step)
    params = {name: jnp.asarray(value) for name, value in parameters.items()}
    row, sums = validation.measure(jax.device_put(params, placement.of(params)), progress)
    nats, targets = sums["position_nats"], sums["position_targets"]
    means = np.divide(nats, targets, out=np.full_like(nats, np.nan), where=targets > 0)
    return {**row, "position_nats": means}


def position_rows(losses: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Mean losses over positions 0, 1, 2-3, 4-7, ...: a row each, as a table shows them."""
    edges = [0, *(2**power for power in range(len(losses).bit_length() + 1))]
    return [
        {
            "positions": str(start) if stop - start == 1 else f"{start}–{stop - 1}",
            "nats a token": float(np.nanmean(losses[start:stop])),
        }
        for start, stop in zip(edges, np.minimum(edges[1:], len(losses)), strict=False)
        if start < stop
    ]


def _devices_for(batch_size: int) -> int:
    """The most devices of this machine that share `batch_size` rows evenly."""
    return max(n for n in range(1, len(jax.devices()) + 1) if batch_size % n == 0)
