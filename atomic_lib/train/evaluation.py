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

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.evidence.verify import ESTIMATED_BYTES_PER_TOKEN
from atomic_lib.train.optimizer import Params
from atomic_lib.train.sharding import Placement

Progress = Callable[[int, int], None]


def bits_per_byte(sums: dict[str, float], targets: int) -> dict[str, float | int | None]:
    """The fields of an eval row from {"nats", "exact_nats", "bytes"} over `targets` targets."""
    ce = sums["nats"] / targets
    length = int(sums["bytes"])
    return {
        "ce": ce,
        "bpb_est": ce / math.log(2) / ESTIMATED_BYTES_PER_TOKEN,
        "bpb_exact": sums["exact_nats"] / math.log(2) / length if length else None,
        "bytes": length if length else None,
        "exact_nats": sums["exact_nats"] if length else None,
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
        totals = {"nats": 0.0, "exact_nats": 0.0, "bytes": 0.0}
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
        targets = self.batches * self.batch_size * self.sequence_length
        return {**bits_per_byte(totals, targets), "batches": self.batches}


def _add(totals: dict[str, float], sums: dict[str, Array] | None) -> None:
    for name, value in jax.device_get(sums or {}).items():
        totals[name] += float(value)
