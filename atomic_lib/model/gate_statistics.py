# SPDX-License-Identifier: Apache-2.0
"""How close the gates of a GDN-2 mixer are to their ends, measured in the forward pass itself.

A gate that sits at 0 or 1 passes no gradient, and a log decay far below 0 empties the state. Both
are seen in raw projections by a comparison and a maximum over tokens, with no exponential a token:

    sigmoid(x) < 0.01  <=>  x < -ln 99          sigmoid(x) > 0.99  <=>  x > ln 99
    min over tokens of g = g(max over tokens of x), because g falls as its projection rises

Shares are counted in a part of the tokens (`_sampled`): passes over all of them took 2 to 3 % of a
full-size step. The decay is that of all tokens, since one that matters may be rare.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from atomic_kernels.gdn2 import decay_gate

Array = jax.Array

GATE_EXTREME = 0.01  # a sigmoid within this of 0 or 1 counts as low or high
RAW_EXTREME = math.log(1 / GATE_EXTREME - 1)
SAMPLED, PERIOD = 16, 128  # tokens


class GateStatistics(NamedTuple):
    """Of one mixer (scalars) or of several (a leading axis), float32.

    Shares of the gates (of sampled tokens, all heads and channels; padding included) whose sigmoid
    is below 0.01 (low) or above 0.99 (high), and the most negative log decay of all tokens, nats.
    """

    erase_low: Array
    erase_high: Array
    write_low: Array
    write_high: Array
    decay_min: Array


def gate_statistics(
    raw_decay: Array,
    raw_erase: Array,
    raw_write: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
) -> GateStatistics:
    """Statistics of raw projections: decays [B, T, H, K], erase and write gates [B, T, H K].

    A_log [H] and dt_bias [H, K] as in `decay_gate`. No gradient flows through the statistics.
    """
    raw_decay, raw_erase, raw_write, A_log, dt_bias = jax.lax.stop_gradient(
        (raw_decay, raw_erase, raw_write, A_log, dt_bias)
    )
    raw_erase, raw_write = _sampled(raw_erase), _sampled(raw_write)

    def share(condition: Array) -> Array:
        return jnp.mean(condition, dtype=jnp.float32)

    return GateStatistics(
        erase_low=share(raw_erase < -RAW_EXTREME),
        erase_high=share(raw_erase > RAW_EXTREME),
        write_low=share(raw_write < -RAW_EXTREME),
        write_high=share(raw_write > RAW_EXTREME),
        decay_min=jnp.min(decay_gate(jnp.max(raw_decay, axis=(0, 1)), A_log, dt_bias)),
    )


def _sampled(x: Array) -> Array:
    """The first 16 of every 128 tokens of x [B, T, D], or all of them if 128 does not divide T.

    Whole tiles of a TPU's memory, and channels in one axis: single tokens, or an axis of heads,
    would make the compiler lay the whole array out anew.
    """
    rows, length, channels = x.shape
    if length % PERIOD:
        return x
    return x.reshape(rows, length // PERIOD, PERIOD, channels)[:, :, :SAMPLED]


def stack_statistics(statistics: list[GateStatistics]) -> GateStatistics | None:
    """One `GateStatistics` with an axis of mixers, or None for a model that has no gates."""
    if not statistics:
        return None
    return GateStatistics(*(jnp.stack(parts) for parts in zip(*statistics, strict=True)))


def merge_statistics(parts: GateStatistics) -> GateStatistics:
    """Statistics of a whole from those of its equal parts, along the first axis."""
    means = GateStatistics(*(jnp.mean(part, axis=0) for part in parts))
    return means._replace(decay_min=jnp.min(parts.decay_min, axis=0))
