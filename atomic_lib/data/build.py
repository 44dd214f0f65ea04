# SPDX-License-Identifier: Apache-2.0
"""Builds a token dataset from documents, once: the folder's name is a key of its content.

A build happens in a temporary folder beside the final one and is renamed when every file is on
disk, so a folder with the final name is complete. Builders of the same key wait for each other.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from atomic_lib.data.encode import encode_documents
from atomic_lib.data.facts import inspect_token_file
from atomic_lib.data.sources import TextSource
from atomic_lib.data.token_file import TOKEN_DTYPE, TokenFile
from atomic_lib.data.tokenizer_file import GPT2, TokenizerChoice

# Raised whenever the same documents would give other files.
SCHEMA = "atomic-token-dataset/1"
MANIFEST = "manifest.json"
SPLIT_FILES = {"train": "train.bin", "validation": "val.bin"}

# (stage, done, total or 0 where unknown, text), as `RunFolder.progress` takes it.
Progress = Callable[[str, float, float, str], None]

# Seconds between updates of the bar: each one is a line in a notebook that runs headless.
_BAR_SECONDS_TERMINAL, _BAR_SECONDS_HEADLESS = 0.5, 30.0


def build_dataset(
    source: TextSource,
    *,
    data_folder: Path,
    validation_fraction: float = 0.1,
    max_tokens: int | None = None,
    tokenizer: TokenizerChoice = GPT2,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Returns the folder of the dataset built from `source`; builds it if it is not there yet.

    validation_fraction: share of documents held out, in (0, 1). max_tokens: stop after the task
    that reaches so many. workers: processes (None: one a CPU). Raises
    ValueError for a fraction outside (0, 1), non-positive max_tokens or workers, or a source with
    no text, and OSError if `data_folder` cannot be written.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must be in (0, 1), got {validation_fraction}.")
    for name, value in (("max_tokens", max_tokens), ("workers", workers)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}.")
    key = _content_key(source, validation_fraction, max_tokens, tokenizer)
    folder = data_folder / f"{_slug(source.name)}-{key[:16]}"
    if (folder / MANIFEST).is_file():
        return folder
    data_folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(data_folder / f".{folder.name}.lock"):
        if (folder / MANIFEST).is_file():  # another process built it while this one waited
            return folder
        scratch = data_folder / f".{folder.name}.building"
        shutil.rmtree(scratch, ignore_errors=True)  # of a builder that was killed: we hold the lock
        scratch.mkdir()
        try:
            _write_dataset(
                source, scratch, validation_fraction, max_tokens, tokenizer, workers, progress
            )
            scratch.rename(folder)
            _fsync_folder(data_folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def _write_dataset(
    source: TextSource,
    folder: Path,
    validation_fraction: float,
    max_tokens: int | None,
    tokenizer: TokenizerChoice,
    workers: int | None,
    progress: Progress | None,
) -> None:
    facts = tokenizer.facts()
    counts = dict.fromkeys(("blank_documents", "repaired_documents"), 0)
    documents = dict.fromkeys(SPLIT_FILES, 0)
    text_bytes = dict.fromkeys(SPLIT_FILES, 0)
    tokens = 0
    encoded = encode_documents(
        source.documents(),
        validation_fraction=validation_fraction,
        workers=workers or os.cpu_count() or 1,
        tokenizer=tokenizer,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(encoded))
        files = {
            split: stack.enter_context((folder / name).open("wb"))
            for split, name in SPLIT_FILES.items()
        }
        bar = stack.enter_context(_progress_bar(source, max_tokens))
        for task in encoded:
            for split, part in (("train", task.train), ("validation", task.validation)):
                files[split].write(part.tokens.astype(TOKEN_DTYPE).tobytes())
                documents[split] += part.documents
                text_bytes[split] += part.text_bytes
                tokens += len(part.tokens)
            counts["blank_documents"] += task.blank_documents
            counts["repaired_documents"] += task.repaired_documents
            bar.update(task.characters if max_tokens is None else tokens - bar.n)
            bar.set_postfix_str(f"{sum(documents.values()):,} documents", refresh=False)
            if progress is not None:
                progress("tokenise", tokens, max_tokens or 0, f"{source.name}: {tokens:,} tokens")
            if max_tokens is not None and tokens >= max_tokens:
                break
        for file in files.values():
            _fsync(file)
    method = "sha256 of each document's text"
    if not all(documents.values()):
        method = _split_at_tail(source, folder, tokens, validation_fraction)
        text_bytes = {}  # the cut may fall inside a document: known for the whole corpus only
    _write_manifest(folder, {
        "schema": SCHEMA,
        "name": source.name,
        "tokenizer": facts,
        "source": source.facts,
        "max_tokens": max_tokens,
        "split": {"method": method, "validation_fraction": validation_fraction},
        "text_bytes": text_bytes,
        **counts,
        **{
            split: [_file_facts(folder / name, facts["separator"])]
            for split, name in SPLIT_FILES.items()
        },
    })  # fmt: skip


def _split_at_tail(source: TextSource, folder: Path, tokens: int, fraction: float) -> str:
    """Too few documents to fill both splits: the last `fraction` of the tokens is held out."""
    train, validation = (folder / name for name in SPLIT_FILES.values())
    held_out = max(1, round(tokens * fraction))
    if tokens <= held_out:
        raise ValueError(
            f"source {source.name!r} gave {tokens} tokens; that is no text to train and validate "
            "on. Give a longer one."
        )
    if train.stat().st_size == 0:
        validation.rename(train)
    ids = np.fromfile(train, dtype=TOKEN_DTYPE)
    for path, part in ((train, ids[:-held_out]), (validation, ids[-held_out:])):
        with path.open("wb") as file:
            file.write(part.tobytes())
            _fsync(file)
    return "the last tokens, because no split by documents fills both sides"


def _content_key(
    source: TextSource, fraction: float, max_tokens: int | None, tokenizer: TokenizerChoice
) -> str:
    parts = [SCHEMA, source.fingerprint, tokenizer.facts()["sha256"], fraction, max_tokens]
    if tokenizer != GPT2:
        parts.append(tokenizer.separator)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "corpus"


def _file_facts(path: Path, separator: int) -> dict[str, Any]:
    return inspect_token_file(TokenFile.open(path), separator=separator).to_json()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.write((json.dumps(manifest, indent=2) + "\n").encode())
        _fsync(file)
    _fsync_folder(folder)


def _progress_bar(source: TextSource, max_tokens: int | None) -> Any:
    """Counts tokens where their number is limited, else bytes of text."""
    return tqdm(
        total=max_tokens or source.text_bytes,
        desc=f"tokenise {source.name}",
        unit="token" if max_tokens else "B",
        unit_scale=True,
        mininterval=_BAR_SECONDS_TERMINAL if sys.stderr.isatty() else _BAR_SECONDS_HEADLESS,
    )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a file lock; the system drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fsync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
