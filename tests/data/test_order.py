# SPDX-License-Identifier: Apache-2.0
"""The order of training windows: reproducible for ever, and no window twice in an epoch.

Oracles: (1) Philox4x64-10 written out below from its publication (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) in Python integers, and Python's own stable sort; neither
uses numpy. (2) The definition of a permutation: each epoch, sorted, is 0..W-1. All exact.
"""

import numpy as np
import pytest

from atomic_lib.data.order import epoch_permutation, sample_windows

WORD = 2**64


def philox_words(key: tuple[int, int], count: int) -> list[int]:
    """The first `count` 64-bit words; a fresh numpy state counts up before its first block."""
    words: list[int] = []
    counter = 0
    while len(words) < count:
        counter += 1
        x0, x1, x2, x3 = (counter >> (64 * i) & (WORD - 1) for i in range(4))
        k0, k1 = key
        for _ in range(10):
            low_0, high_0 = divmod(0xD2E7470EE14C6C93 * x0, WORD)[::-1]
            low_1, high_1 = divmod(0xCA5A826395121157 * x2, WORD)[::-1]
            x0, x1, x2, x3 = high_1 ^ x1 ^ k0, low_1, high_0 ^ x3 ^ k1, low_0
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) % WORD, (k1 + 0xBB67AE8584CAA73B) % WORD
        words += [x0, x1, x2, x3]
    return words[:count]


@pytest.mark.parametrize("windows", [1, 2, 97, 1000])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (43, 0), (43, 7), (2**64 - 1, 2**40)])
def test_epoch_permutation_is_philox_sorted(seed, epoch, windows):
    draws = philox_words((seed, epoch), windows)
    expected = sorted(range(windows), key=draws.__getitem__)
    got = epoch_permutation(seed, epoch, windows)
    assert got.shape == (windows,)
    assert got.dtype == np.int64
    assert got.tolist() == expected


@pytest.mark.parametrize("windows", [1, 5, 64, 101])
@pytest.mark.parametrize("batch", [1, 4, 7, 150])
def test_no_window_comes_twice_in_an_epoch_even_when_batches_straddle(batch, windows):
    epochs = 3
    steps = -(-epochs * windows // batch)
    samples = np.concatenate(
        [sample_windows(5, step * batch, batch, windows) for step in range(steps)]
    )
    for epoch in range(epochs):
        part = samples[epoch * windows : (epoch + 1) * windows]
        assert sorted(part.tolist()) == list(range(windows)), f"epoch {epoch}"


def test_each_epoch_has_the_order_of_its_own_number():
    samples = sample_windows(5, 0, 300, 100).reshape(3, 100)
    for epoch, part in enumerate(samples):
        np.testing.assert_array_equal(part, epoch_permutation(5, epoch, 100), err_msg=f"{epoch}")


def test_order_does_not_depend_on_the_batch_size():
    by_three = np.concatenate([sample_windows(1, 3 * s, 3, 50) for s in range(40)])
    by_eight = np.concatenate([sample_windows(1, 8 * s, 8, 50) for s in range(15)])
    np.testing.assert_array_equal(by_three, by_eight)


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(epoch_permutation(seed, epoch, 200).tolist()) for seed in (1, 2) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_a_cached_order_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        epoch_permutation(1, 0, 10)[0] = 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 10), r"seed must be in \[0, 2\*\*64\), got -1"),
        ((2**64, 0, 10), r"seed must be in"),
        ((0, -1, 10), r"epoch must be in .*got -1"),
        ((0, 0, 0), r"windows must be positive, got 0"),
    ],
    ids=str,
)
def test_values_that_make_no_order_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        epoch_permutation(*arguments)


def test_negative_samples_are_refused():
    with pytest.raises(ValueError, match="first_sample and count must not be negative, got -4"):
        sample_windows(0, -4, 4, 10)
