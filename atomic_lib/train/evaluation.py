# SPDX-License-Identifier: Apache-2.0
"""Validation during training: cross-entropy and bits per byte over consecutive full batches.

    ce        = nats / targets
    bpb_est   = ce / ln 2 / 4.2                   the published estimate, a fixed divisor
    bpb_exact = exact_nats / ln 2 / bytes         targets that have text, and their UTF-8 bytes

Document separators have no bytes and are left out of `exact_nats` and `bytes` alike. Sums within a
batch are float32 on the devices, over batches float64 here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.evidence.verify import ESTIMATED_BYTES_PER_TOKEN
from atomic_lib.train.optimizer import Params
from atomic_lib.train.sharding import Placement

Progress = Callable[[int, int], None]
Sums = dict[str, NDArray[np.float64]]


def bits_per_byte(sums: Sums, targets: int) -> dict[str, float | int | None]:
    """The fields of an eval row from {"nats", "exact_nats", "bytes"} over `targets` targets."""
    ce = float(sums["nats"]) / targets
    length, exact_nats = int(sums["bytes"]), float(sums["exact_nats"])
    return {
        "ce": ce,
        "bpb_est": ce / math.log(2) / ESTIMATED_BYTES_PER_TOKEN,
        "bpb_exact": exact_nats / math.log(2) / length if length else None,
        "bytes": length if length else None,
        "exact_nats": exact_nats if length else None,
        "target_tokens": targets,
    }


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation split of one run, ready to be evaluated again and again."""

    evaluate: Callable[[Params, Array, Array], dict[str, Array]]
    placement: Placement
    dataset: TokenDataset
    token_bytes: Array  # int32 [V]; all 0 if the tokenizer's bytes are not known
    batch_size: int
    sequence_length: int
    batches: int

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        dataset: TokenDataset,
        placement: Placement,
        evaluate: Callable[[Params, Array, Array], dict[str, Array]],
    ) -> "Validation":
        """Prepares `config`'s evaluation; raises ValueError if the split has no full batch."""
        size, length = config.batch_size, config.sequence_length
        available = dataset.validation_batch_count(size, length)
        token_bytes = dataset.bytes_per_token()
        if token_bytes is None:
            token_bytes = np.zeros(dataset.vocab_size, np.int32)
        return cls(
            evaluate=evaluate,
            placement=placement,
            dataset=dataset,
            token_bytes=jax.device_put(token_bytes.astype(np.int32), placement.replicated),
            batch_size=size,
            sequence_length=length,
            batches=min(available, config.eval_batches or available),
        )

    def run(self, params: Params, progress: Progress = lambda done, total: None) -> dict[str, Any]:
        """Evaluates `params`; returns the fields of an eval row but step, tokens and elapsed_s."""
        return self.row(self.sums(params, progress))

    def row(self, sums: Sums) -> dict[str, Any]:
        """The fields of an eval row, from `sums`."""
        targets = self.batches * self.batch_size * self.sequence_length
        return {**bits_per_byte(sums, targets), "batches": self.batches}

    def sums(self, params: Params, progress: Progress = lambda done, total: None) -> Sums:
        """The evaluation step's sums over all batches, float64."""
        totals: Sums = {}
        waiting: dict[str, Array] | None = None
        batches = self.dataset.validation_batches(
            self.batch_size, self.sequence_length, limit=self.batches
        )
        for number, rows in enumerate(batches):
            sums = self.evaluate(params, self.placement.place_batch(rows), self.token_bytes)
            _add(totals, waiting)  # of the batch before: the device is never idle meanwhile
            waiting = sums
            progress(number, self.batches)
        _add(totals, waiting)
        progress(self.batches, self.batches)
        return totals


def _add(totals: Sums, sums: dict[str, Array] | None) -> None:
    for name, value in jax.device_get(sums or {}).items():
        totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
