# SPDX-License-Identifier: Apache-2.0
"""Any tokenizer that the `tokenizers` library can read: a tokenizer.json, on disk or on the hub.

A `TokenizerChoice` names one in a way that a process started afresh can load again. None of its
special tokens are recognised in documents: what looks like one is ordinary text, so a separator in
a token file always ends a document.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from atomic_lib.data.token_file import TOKEN_DTYPE
from atomic_lib.data.tokenizer import (
    GPT2_SEPARATOR,
    GPT2_SHA256,
    GPT2_VOCAB_SIZE,
    gpt2_tokenizer,
)

FILE_NAME = "tokenizer.json"


class Encoder(Protocol):
    """What turns documents into ids; `separator` is the id that ends each one."""

    @property
    def separator(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.uint16]:
        """The ids of a text, uint16, without the separator."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """GPT-2's tokenizer of the pinned package, or the tokenizer.json at `path`.

    name: for the record; separator: the text of the token that ends a document.
    """

    name: str = "gpt2"
    path: Path | None = None
    separator: str = ""

    def load(self) -> Encoder:
        """The tokenizer itself, read once a process. Raises as `file_tokenizer` does."""
        if self.path is None:
            return gpt2_tokenizer()
        return file_tokenizer(self.path, self.separator)

    def facts(self) -> dict[str, Any]:
        """The tokenizer as a dataset's manifest records it."""
        if self.path is None:
            return {
                "name": "gpt2", "vocab_size": GPT2_VOCAB_SIZE, "separator": GPT2_SEPARATOR,
                "sha256": GPT2_SHA256,
            }  # fmt: skip
        loaded = file_tokenizer(self.path, self.separator)
        return {
            "name": self.name,
            "vocab_size": loaded.bpe.get_vocab_size(),
            "separator": loaded.separator,
            "sha256": {FILE_NAME: loaded.sha256},
        }


GPT2 = TokenizerChoice()


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTokenizer:
    """A tokenizer read from a file with this sha256."""

    bpe: Tokenizer
    separator: int
    sha256: str

    def encode(self, text: str) -> NDArray[np.uint16]:
        """The ids of a text, uint16, with no token added before or after."""
        return np.array(self.bpe.encode(text, add_special_tokens=False).ids, dtype=TOKEN_DTYPE)


@functools.lru_cache(maxsize=2)
def file_tokenizer(path: Path, separator: str) -> FileTokenizer:
    """The tokenizer of a tokenizer.json.

    Raises FileNotFoundError for a missing file, and ValueError for one that is no tokenizer, for a
    separator that is none of its tokens, or for more tokens than 16 bits can number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist")
    content = path.read_bytes()
    try:
        bpe = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no {FILE_NAME} of the tokenizers library: {error}") from error
    limit = 2 ** (8 * TOKEN_DTYPE.itemsize)
    if bpe.get_vocab_size() > limit:
        raise ValueError(
            f"{path} has {bpe.get_vocab_size()} tokens; token files hold ids below {limit}"
        )
    end = bpe.token_to_id(separator)
    if end is None:
        raise ValueError(
            f"separator: {separator!r} is no token of {path}; name the one that ends a document, "
            "as in '?tokenizer=...&separator=</s>'"
        )
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True  # that is: as ordinary characters
    return FileTokenizer(bpe=bpe, separator=end, sha256=hashlib.sha256(content).hexdigest())


def choose_tokenizer(name: str, separator: str, root: Path) -> TokenizerChoice:
    """The tokenizer `name`: a tokenizer.json below `root`, or "<owner>/<model>" of the hub.

    The hub's file is downloaded once and cached. Raises FileNotFoundError if there is neither, and
    as `file_tokenizer` does.
    """
    path = root / Path(name).expanduser()
    if path.is_dir():
        path = path / FILE_NAME
    if not path.is_file():
        path = _download(name, root)
    choice = TokenizerChoice(name=name, path=path, separator=separator)
    choice.load()
    return choice


def _download(name: str, root: Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, FILE_NAME))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"tokenizer: {name!r} is no file below {root}, and the Hugging Face hub did not give "
            f"its {FILE_NAME} ({error}). Give the path of a {FILE_NAME}, or <owner>/<model>."
        ) from error
