# SPDX-License-Identifier: Apache-2.0
"""Token files: little-endian uint16 ids on disk, memory-mapped.

Two layouts are read, told apart by the first four bytes:
  flat    nothing but ids, as nanoGPT writes them;
  llm.c   a header of 256 int32 (magic 20240520, version 1, token count, zeros), then the ids.
A flat file cannot be taken for the other by chance when its ids are GPT-2's: read as ids the magic
is 55432, 308, and 55432 is above GPT-2's last id, 50256.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TOKEN_DTYPE = np.dtype("<u2")
HEADER_MAGIC = 20240520
HEADER_VERSION = 1
HEADER_BYTES = 256 * 4  # 256 int32


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One token file. `tokens` is a read-only memory map, uint16 [token count]."""

    path: Path
    tokens: NDArray[np.uint16]
    header_bytes: int
    size_bytes: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenFile":
        """Opens and checks a flat or llm.c token file; no id is read.

        Raises FileNotFoundError for a missing file, and ValueError for an empty file, an odd number
        of bytes, an unknown header version, or a header that counts other tokens than the file has.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"token file {path} does not exist. Give a file of little-endian uint16 token ids."
            )
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"token file {path} is empty; it must hold at least one uint16 id.")
        header_bytes = _header_bytes(path, size)
        if size % TOKEN_DTYPE.itemsize:
            raise ValueError(
                f"token file {path} has {size} bytes, an odd number; uint16 ids take two bytes "
                "each, so the file was cut or is in another format. Copy or build it again."
            )
        tokens = np.memmap(path, dtype=TOKEN_DTYPE, mode="r", offset=header_bytes)
        return cls(path=path, tokens=tokens, header_bytes=header_bytes, size_bytes=size)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def layout(self) -> str:
        """Which of the two layouts the file has: "flat" or "llm.c"."""
        return "llm.c" if self.header_bytes else "flat"

    def window_count(self, sequence_length: int) -> int:
        """How many windows of sequence_length inputs, each with its next-token targets, fit."""
        return max(0, (len(self) - 1) // sequence_length)

    def read_windows(self, indices: NDArray[np.integer], sequence_length: int) -> NDArray[np.int32]:
        """Windows i -> tokens[i*T : i*T + T + 1], T = sequence_length, as int32 [n, T + 1].

        The last token of a window is the first of the next: it is a target here, an input there.
        Raises RuntimeError if the file has another size than when it was opened (reading a map
        past the end of its file would kill the process without a message), and IndexError for a
        window outside the file.
        """
        size = self.path.stat().st_size
        if size != self.size_bytes:
            raise RuntimeError(
                f"token file {self.path} had {self.size_bytes} bytes when opened and has {size} "
                "now; it changed during the run. Restore it and resume."
            )
        count = self.window_count(sequence_length)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < count:
            raise IndexError(
                f"window indices {int(indices.min())}..{int(indices.max())} are outside "
                f"{self.path}, which has {count} windows of {sequence_length}."
            )
        windows = np.empty((len(indices), sequence_length + 1), dtype=np.int32)
        for row, index in enumerate(indices):
            start = int(index) * sequence_length
            windows[row] = self.tokens[start : start + sequence_length + 1]
        return windows


def _header_bytes(path: Path, size: int) -> int:
    """The length of the header: 0 for a flat file, 1024 for a checked llm.c shard."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < 4 or int.from_bytes(header[:4], "little") != HEADER_MAGIC:
        return 0
    if len(header) < HEADER_BYTES:
        raise ValueError(
            f"token file {path} begins with the llm.c magic {HEADER_MAGIC} but has only {size} "
            f"bytes; its header alone takes {HEADER_BYTES}. The file was cut: copy it again."
        )
    version, count = (int(x) for x in np.frombuffer(header, dtype="<i4")[1:3])
    if version != HEADER_VERSION:
        raise ValueError(
            f"token file {path} has llm.c header version {version}; only version "
            f"{HEADER_VERSION} (uint16 ids) can be read."
        )
    expected = HEADER_BYTES + count * TOKEN_DTYPE.itemsize
    if count <= 0 or size != expected:
        raise ValueError(
            f"token file {path}: its llm.c header counts {count} tokens, which makes {expected} "
            f"bytes, but the file has {size}. It was cut or damaged: copy it again."
        )
    return HEADER_BYTES
