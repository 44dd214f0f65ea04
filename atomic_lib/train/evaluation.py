# SPDX-License-Identifier: Apache-2.0
"""Validation during training: cross-entropy and bits per byte over consecutive full batches.

    ce        = nats / targets
    bpb_est   = ce / ln 2 / 4.2                   the published estimate, a fixed divisor
    bpb_exact = exact_nats / ln 2 / bytes         targets that have text, and their UTF-8 bytes

Document separators have no bytes and are left out of `exact_nats` and `bytes` alike. Where a run
keeps documents apart, targets are those inside documents. Sums within a batch are float32 on the
devices, over batches float64 here.

The same tokens can be read again in longer sequences (`eval_lengths`): what a model makes of more
context than it was trained with. Every length covers the same text, so their losses compare.
"""

import math
from collections.abc import Callable, Iterator
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
class Pass:
    """One reading of the split's first tokens: `windows` of `length` tokens, `rows` at a time."""

    length: int
    windows: int
    rows: int

    @property
    def batches(self) -> int:
        """Batches, the last of which may be partly padding."""
        return -(-self.windows // self.rows)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation split of one run, ready to be evaluated again and again.

    `main` is the pass at the training length, `longer` those at `eval_lengths`.
    """

    evaluate: Callable[..., dict[str, Array]]
    placement: Placement
    dataset: TokenDataset
    token_bytes: Array  # int32 [V]; all 0 if the tokenizer's bytes are not known
    main: Pass
    longer: tuple[Pass, ...] = ()

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        dataset: TokenDataset,
        placement: Placement,
        evaluate: Callable[..., dict[str, Array]],
    ) -> "Validation":
        """Prepares `config`'s evaluation.

        Raises ValueError if the split has no full batch, or too few windows of a longer length.
        """
        size, length = config.eval_rows, config.sequence_length
        available = dataset.validation_batch_count(size, length)
        batches = min(available, config.eval_batches or available)
        main = Pass(length=length, windows=batches * size, rows=size)
        token_bytes = dataset.bytes_per_token()
        if token_bytes is None:
            token_bytes = np.zeros(dataset.vocab_size, np.int32)
        return cls(
            evaluate=evaluate,
            placement=placement,
            dataset=dataset,
            token_bytes=jax.device_put(token_bytes.astype(np.int32), placement.replicated),
            main=main,
            longer=tuple(
                _longer_pass(main, longer, dataset, placement.devices)
                for longer in config.eval_lengths
            ),
        )

    def run(self, params: Params, progress: Progress = lambda done, total: None) -> dict[str, Any]:
        """Evaluates `params`; returns the fields of an eval row but step, tokens and elapsed_s."""
        return self.measure(params, progress)[0]

    def measure(
        self, params: Params, progress: Progress = lambda done, total: None
    ) -> tuple[dict[str, Any], Sums]:
        """The fields of an eval row, and the evaluation step's sums over the main pass, float64.

        With longer passes, by_length lists length, ce, target_tokens and windows of each.
        """
        total = sum(one.batches for one in (self.main, *self.longer))
        sums, done = self._sums(params, self.main, progress, 0, total)
        targets = int(sums["position_targets"].sum())
        row = {**bits_per_byte(sums, targets), "batches": self.main.batches}
        by_length = []
        for one in self.longer:
            longer, done = self._sums(params, one, progress, done, total)
            targets = int(longer["position_targets"].sum())
            by_length.append({
                "length": one.length, "ce": float(longer["nats"]) / targets,
                "target_tokens": targets, "windows": one.windows,
            })  # fmt: skip
        progress(total, total)
        return ({**row, "by_length": by_length} if by_length else row), sums

    def _sums(
        self, params: Params, one: Pass, progress: Progress, done: int, total: int
    ) -> tuple[Sums, int]:
        """The sums of one pass, and how many of all batches are done with it."""
        totals: Sums = {}
        waiting: dict[str, Array] | None = None
        for rows, counted in self._batches(one):
            arguments = () if counted is None else (np.int32(counted),)
            tokens = self.placement.place_batch(rows)
            sums = self.evaluate(params, tokens, self.token_bytes, *arguments)
            _add(totals, waiting)  # of the batch before: the device is never idle meanwhile
            waiting = sums
            progress(done, total)
            done += 1
        _add(totals, waiting)
        return totals, done

    def _batches(self, one: Pass) -> Iterator[tuple[NDArray[np.int32], int | None]]:
        """This process's rows of each batch [rows, length + 1], and how many of all its rows count
        (None: all, always)."""
        held = self.placement.local_rows(one.rows)
        if one.windows % one.rows == 0:
            for rows in self.dataset.validation_batches(
                one.rows, one.length, limit=one.windows // one.rows, rows=held
            ):
                yield rows, None
            return
        for first in range(0, one.windows, one.rows):
            # The last windows again, where there are no more: their rows are not counted.
            indices = np.minimum(first + held, one.windows - 1)
            yield (
                self.dataset.validation_windows(indices, one.length),
                min(one.rows, one.windows - first),
            )


def _longer_pass(main: Pass, length: int, dataset: TokenDataset, devices: int) -> Pass:
    """The pass over the text of `main` in sequences of `length`, about as many tokens a batch."""
    windows = main.windows * main.length // length
    available = dataset.validation.window_count(length)
    if not 0 < windows <= available:
        raise ValueError(
            f"eval_lengths: {length} needs at least one window and has {available}; the "
            f"evaluation reads {main.windows} windows of {main.length}, {windows} of that length. "
            "Raise eval_batches, or choose shorter ones."
        )
    share = max(1, main.rows * main.length // length)
    return Pass(length=length, windows=windows, rows=-(-share // devices) * devices)


def _add(totals: Sums, sums: dict[str, Array] | None) -> None:
    for name, value in jax.device_get(sums or {}).items():
        totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
