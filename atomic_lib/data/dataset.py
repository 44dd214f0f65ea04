# SPDX-License-Identifier: Apache-2.0
"""`TokenDataset`: the two splits of a tokenised corpus, and the batches a run reads from them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atomic_lib.data.build import MANIFEST, SCHEMA, SPLIT_FILES
from atomic_lib.data.facts import TokenFileFacts, inspect_token_file
from atomic_lib.data.order import sample_windows
from atomic_lib.data.token_file import TokenFile
from atomic_lib.data.tokenizer import (
    GPT2_SEPARATOR,
    GPT2_VOCAB_SIZE,
    bytes_per_token,
    gpt2_tokenizer,
)

# A folder with no manifest is taken for GPT-2 ids if the model's vocabulary is GPT-2's, or that
# padded to a multiple of up to 1024 rows.
_PADDED_GPT2_VOCAB_SIZE = -(-GPT2_VOCAB_SIZE // 1024) * 1024


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """The token files of one split, in order. No window crosses from one file into the next."""

    name: str
    files: tuple[TokenFile, ...]

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(len(file) for file in self.files)

    def window_count(self, sequence_length: int) -> int:
        """How many windows of sequence_length the split has.

        Raises ValueError if sequence_length is not positive or no file holds a whole window.
        """
        if sequence_length <= 0:
            raise ValueError(f"sequence_length must be positive, got {sequence_length}.")
        count = sum(file.window_count(sequence_length) for file in self.files)
        if count == 0:
            longest = max(self.files, key=len)
            raise ValueError(
                f"sequence_length: {sequence_length} needs {sequence_length + 1} tokens, but the "
                f"{self.name} split's longest file {longest.path} has {len(longest)}. Choose at "
                f"most {len(longest) - 1}, or a larger corpus."
            )
        return count

    def read_windows(self, indices: NDArray[np.integer], sequence_length: int) -> NDArray[np.int32]:
        """The windows with these indices, int32 [n, sequence_length + 1]."""
        counts = [file.window_count(sequence_length) for file in self.files]
        ends = np.cumsum(counts)
        windows = np.empty((len(indices), sequence_length + 1), dtype=np.int32)
        owners = np.searchsorted(ends, indices, side="right")
        for owner in np.unique(owners):
            if owner >= len(self.files):
                raise IndexError(
                    f"window index {int(indices.max())} is outside the {self.name} split, which "
                    f"has {int(ends[-1])} windows of {sequence_length}."
                )
            rows = np.flatnonzero(owners == owner)
            local = indices[rows] - (ends[owner] - counts[owner])
            windows[rows] = self.files[owner].read_windows(local, sequence_length)
        return windows


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """A tokenised corpus. `manifest` says what it is and what was checked, as a JSON object."""

    folder: Path
    train: TokenSplit
    validation: TokenSplit
    vocab_size: int
    manifest: dict[str, Any]

    def train_batch(
        self,
        seed: int,
        step: int,
        *,
        batch_size: int,
        sequence_length: int,
        rows: slice | NDArray[np.integer] = slice(None),
    ) -> NDArray[np.int32]:
        """Batch `step` (from 0) of a run, int32 [batch_size, sequence_length + 1].

        A pure function of its arguments and the files: inputs are [:, :-1], targets [:, 1:]. See
        `order` for which windows come when. rows: only these rows of the batch, for a process that
        feeds its share of it. Raises ValueError for sizes that are not positive or do not fit, or
        an id outside the vocabulary, and RuntimeError if a file has changed since it was opened.
        """
        indices = self.train_windows(
            seed, step, batch_size=batch_size, sequence_length=sequence_length
        )
        windows = self.train.read_windows(indices[rows], sequence_length)
        return self._checked(windows, "train")

    def train_windows(
        self, seed: int, step: int, *, batch_size: int, sequence_length: int
    ) -> NDArray[np.int64]:
        """The window indices of that batch, int64 [batch_size]: its position in the data."""
        _require_positive(batch_size=batch_size)
        windows = self.train.window_count(sequence_length)
        return sample_windows(seed, step * batch_size, batch_size, windows)

    def train_epochs(self, step: int, *, batch_size: int, sequence_length: int) -> float:
        """How often the training windows have been read through after `step` steps."""
        return step * batch_size / self.train.window_count(sequence_length)

    def validation_batch_count(self, batch_size: int, sequence_length: int) -> int:
        """How many full batches the validation split has.

        Raises ValueError if it has none.
        """
        _require_positive(batch_size=batch_size)
        windows = self.validation.window_count(sequence_length)
        if windows < batch_size:
            raise ValueError(
                f"batch_size: {batch_size} x sequence_length {sequence_length} is more than the "
                f"validation split holds ({len(self.validation)} tokens, {windows} windows). "
                f"Choose a batch_size of at most {windows}, or shorter sequences."
            )
        return windows // batch_size

    def validation_batches(
        self,
        batch_size: int,
        sequence_length: int,
        *,
        limit: int | None = None,
        rows: slice | NDArray[np.integer] = slice(None),
    ) -> Iterator[NDArray[np.int32]]:
        """Consecutive windows of the validation split, int32 [batch_size, sequence_length + 1].

        Only full batches; at most `limit` of them; of each only `rows`. Raises as `train_batch`
        does.
        """
        count = self.validation_batch_count(batch_size, sequence_length)
        if limit is not None:
            _require_positive(limit=limit)
            count = min(count, limit)
        for batch in range(count):
            indices = np.arange(batch * batch_size, (batch + 1) * batch_size)
            yield self.validation_windows(indices[rows], sequence_length)

    def validation_windows(
        self, indices: NDArray[np.integer], sequence_length: int
    ) -> NDArray[np.int32]:
        """Windows of the validation split by their indices, int32 [n, sequence_length + 1]."""
        windows = self.validation.read_windows(indices, sequence_length)
        return self._checked(windows, "validation")

    @property
    def separator(self) -> int | None:
        """The id that ends each document, or None if the tokenizer is not known."""
        return self.manifest["tokenizer"].get("separator")

    def bytes_per_token(self) -> NDArray[np.int32] | None:
        """UTF-8 bytes of each id, int32 [vocab_size], or None if the tokenizer is not GPT-2's."""
        if self.manifest["tokenizer"]["name"] != "gpt2":
            return None
        return bytes_per_token(gpt2_tokenizer(), vocab_size=self.vocab_size)

    def _checked(self, windows: NDArray[np.int32], split: str) -> NDArray[np.int32]:
        # A gather on an accelerator clamps an index out of range without a word.
        if windows.size and int(windows.max()) >= self.vocab_size:
            raise ValueError(
                f"the {split} split of {self.folder} holds token id {int(windows.max())}, but "
                f"vocab_size is {self.vocab_size}. Use the tokenizer that the model was made for."
            )
        return windows


def open_token_folder(folder: Path, *, vocab_size: int) -> TokenDataset:
    """Opens a folder with train.bin and val.bin, or with llm.c shards *_train_*, *_val_*.

    A manifest.json of ours is checked against the files (sizes and hashes); without one the facts
    are gathered here. Every id is compared with vocab_size in files up to 1 GB, a sample in larger
    ones (the manifest says which), and again in each batch. Raises FileNotFoundError for a missing
    file, and ValueError for a damaged one or an id outside the vocabulary.
    """
    recorded = _read_manifest(folder / MANIFEST)
    tokenizer = recorded["tokenizer"] if recorded else _assumed_tokenizer(vocab_size)
    splits = {
        name: TokenSplit(name=name, files=tuple(TokenFile.open(p) for p in paths))
        for name, paths in _split_paths(folder).items()
    }
    facts = {
        name: [inspect_token_file(f, separator=tokenizer.get("separator")) for f in split.files]
        for name, split in splits.items()
    }
    for name, found in facts.items():
        for fact in found:
            _require_ids_fit(folder, fact, vocab_size)
        if recorded:
            _require_recorded(folder, recorded[name], found)
    gathered = {name: [fact.to_json() for fact in found] for name, found in facts.items()}
    manifest = recorded or {"schema": SCHEMA, "name": folder.name, "tokenizer": tokenizer}
    return TokenDataset(
        folder=folder,
        train=splits["train"],
        validation=splits["validation"],
        vocab_size=vocab_size,
        manifest={**manifest, **gathered},
    )


def _split_paths(folder: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give one with train.bin and val.bin.")
    flat = {split: [folder / name] for split, name in SPLIT_FILES.items()}
    if all(paths[0].is_file() for paths in flat.values()):
        return flat
    shards = {
        "train": sorted(folder.glob("*_train_*.bin")),
        "validation": sorted(folder.glob("*_val_*.bin")),
    }
    if all(shards.values()):
        return shards
    found = sorted(path.name for path in folder.iterdir())
    raise FileNotFoundError(
        f"{folder} has neither train.bin and val.bin nor shards *_train_*.bin and *_val_*.bin; "
        f"it holds {found[:20] or 'nothing'}."
    )


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Our manifest, or None if there is none (somebody else's manifest.json counts as none)."""
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); delete its folder to build it again."
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if not isinstance(schema, str) or schema.split("/")[0] != SCHEMA.split("/")[0]:
        return None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this version reads {SCHEMA!r}.")
    return manifest


def _assumed_tokenizer(vocab_size: int) -> dict[str, Any]:
    if GPT2_VOCAB_SIZE <= vocab_size <= _PADDED_GPT2_VOCAB_SIZE:
        return {
            "name": "gpt2", "vocab_size": GPT2_VOCAB_SIZE, "separator": GPT2_SEPARATOR,
            "assumed": f"no manifest; vocab_size is {vocab_size}",
        }  # fmt: skip
    return {"name": "unknown", "vocab_size": vocab_size}


def _require_ids_fit(folder: Path, facts: TokenFileFacts, vocab_size: int) -> None:
    if facts.largest_id >= vocab_size:
        raise ValueError(
            f"token file {folder / facts.file} holds id {facts.largest_id}, but vocab_size is "
            f"{vocab_size}: ids must be below it. Use the tokenizer that the model was made for, "
            f"or a model with at least {facts.largest_id + 1} embeddings."
        )


def _require_recorded(
    folder: Path, recorded: list[dict[str, Any]], found: list[TokenFileFacts]
) -> None:
    for want, got in zip(recorded, found, strict=True):
        for key in ("file", "bytes", "hash_method", "hash"):
            if want[key] != getattr(got, key):
                raise ValueError(
                    f"token file {folder / got.file}: {key} is {getattr(got, key)!r}, but "
                    f"{MANIFEST} records {want[key]!r}. It was damaged or replaced: delete "
                    f"{folder} to build it again."
                )


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}.")
