# SPDX-License-Identifier: Apache-2.0
"""What can be said about a token file by reading it once: its hash, largest id and documents.

Files up to 1 GB are read whole. Larger ones (OpenWebText is 18 GB) are sampled: 64 blocks of 1 MiB
at even distances, the first at the start of the file and the last at its end. The facts name the
method, and `TokenDataset` checks the ids of every batch again as it reads it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atomic_lib.data.token_file import TOKEN_DTYPE, TokenFile

FULL_READ_LIMIT_BYTES = 10**9
SAMPLE_BLOCKS = 64
SAMPLE_BLOCK_BYTES = 2**20
READ_BYTES = 2**24

FULL_HASH = "sha256"
SAMPLED_HASH = f"sha256 of the size (8 bytes, little-endian) and {SAMPLE_BLOCKS} blocks of 1 MiB"


@dataclass(frozen=True, kw_only=True)
class TokenFileFacts:
    """Facts about one token file, as its manifest records them."""

    file: str
    layout: str
    bytes: int
    tokens: int
    documents: int | None  # separators in the file; None where the file was only sampled
    largest_id: int
    ids_checked: int
    hash_method: str
    hash: str

    def to_json(self) -> dict[str, Any]:
        """The facts as a JSON object."""
        return asdict(self)


def inspect_token_file(file: TokenFile, *, separator: int | None) -> TokenFileFacts:
    """Reads a token file (or samples it, above 1 GB) and returns its facts."""
    whole = file.size_bytes <= FULL_READ_LIMIT_BYTES
    digest = hashlib.sha256()
    if not whole:
        digest.update(file.size_bytes.to_bytes(8, "little"))
    largest, checked, documents = 0, 0, 0
    for offset, block in _blocks(file.path, file.size_bytes, whole=whole):
        digest.update(block)
        # The header is hashed but holds no ids. Offsets are even: blocks never cut an id.
        ids = np.frombuffer(block[max(0, file.header_bytes - offset) :], dtype=TOKEN_DTYPE)
        if len(ids):
            largest = max(largest, int(ids.max()))
            checked += len(ids)
            if separator is not None:
                documents += int(np.count_nonzero(ids == separator))
    return TokenFileFacts(
        file=file.path.name,
        layout=file.layout,
        bytes=file.size_bytes,
        tokens=len(file),
        documents=documents if whole and separator is not None else None,
        largest_id=largest,
        ids_checked=checked,
        hash_method=FULL_HASH if whole else SAMPLED_HASH,
        hash=digest.hexdigest(),
    )


def hash_file(path: Path) -> tuple[str, str]:
    """(method, hex digest) of any file, by the same rule: whole up to 1 GB, else sampled."""
    size = path.stat().st_size
    whole = size <= FULL_READ_LIMIT_BYTES
    digest = hashlib.sha256()
    if not whole:
        digest.update(size.to_bytes(8, "little"))
    for _, block in _blocks(path, size, whole=whole):
        digest.update(block)
    return (FULL_HASH if whole else SAMPLED_HASH), digest.hexdigest()


def _blocks(path: Path, size: int, *, whole: bool) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the whole file in order, or of its samples."""
    offsets: Sequence[int] = range(0, size, READ_BYTES)
    length = READ_BYTES
    if not whole:
        last = size - SAMPLE_BLOCK_BYTES
        offsets = [last * i // (SAMPLE_BLOCKS - 1) // 2 * 2 for i in range(SAMPLE_BLOCKS)]
        length = SAMPLE_BLOCK_BYTES
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield offset, file.read(length)
