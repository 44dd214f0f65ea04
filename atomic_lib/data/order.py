# SPDX-License-Identifier: Apache-2.0
"""The order in which training windows are read: a fresh permutation for every epoch.

Sample s (counted from 0 over the whole run) is window perm[seed, epoch][s mod W] of W windows,
epoch = s // W. Sample numbers do not restart at a step, so
  - no window comes twice in an epoch, also when a batch straddles two epochs;
  - the order of samples does not depend on the batch size;
  - the position in the data is (seed, step), nothing else.

Permutation = stable argsort of W draws of Philox4x64-10 under the key (seed, epoch). numpy may
change what `Generator.permutation` returns between releases, but it guarantees the raw stream of a
bit generator (NEP 19), and a stable sort of given keys has one answer. Two draws of 64 bits collide
with probability W^2 / 2^65 (5e-7 at 4.4 M windows); then the lower window comes first.
"""

import functools

import numpy as np
from numpy.typing import NDArray


# Two epochs: a batch may straddle them. 4.4 M windows (9 B tokens at 2,048) take 35 MB an epoch.
@functools.lru_cache(maxsize=2)
def epoch_permutation(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    """The order of one epoch: read-only int64 [windows], each of 0..windows-1 once.

    Raises ValueError if seed or epoch is not in [0, 2**64) or windows is not positive.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}.")
    if windows <= 0:
        raise ValueError(f"windows must be positive, got {windows}.")
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(windows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


def sample_windows(seed: int, first_sample: int, count: int, windows: int) -> NDArray[np.int64]:
    """Window indices of samples first_sample .. first_sample + count - 1, int64 [count].

    Raises ValueError if first_sample or count is negative, and as `epoch_permutation` does.
    """
    if first_sample < 0 or count < 0:
        raise ValueError(
            f"first_sample and count must not be negative, got {first_sample} and {count}."
        )
    parts = []
    sample, end = first_sample, first_sample + count
    while sample < end:
        epoch, position = divmod(sample, windows)
        taken = min(end - sample, windows - position)
        parts.append(epoch_permutation(seed, epoch, windows)[position : position + taken])
        sample += taken
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
