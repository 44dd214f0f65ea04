# SPDX-License-Identifier: Apache-2.0
"""Small corpora and token folders that the data tests share. No test here uses a network."""

import random

import numpy as np
import pytest

WORDS = ["alpha", "beta", "river", "stone", "cloud", "lantern", "winter", "1871", "42"]


@pytest.fixture
def documents():
    """Forty documents of 5 to 60 words; always the same ones."""
    generator = random.Random(7)
    return [
        " ".join(generator.choices(WORDS, k=generator.randint(5, 60))) + f"\nNumber {i}.\n"
        for i in range(40)
    ]


@pytest.fixture
def token_folder(tmp_path):
    """A nanoGPT folder: train.bin counts 0..996 (997 tokens), val.bin 0..396."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.arange(997, dtype="<u2").tofile(folder / "train.bin")
    np.arange(397, dtype="<u2").tofile(folder / "val.bin")
    return folder
