# SPDX-License-Identifier: Apache-2.0
"""Documents to token ids: split, encoded and packed, in this process or in several.

A document belongs to the validation split if the first 64 bits of its sha256, as a fraction of
2^64, are below the fraction wanted. Its place in the corpus does not matter, and copies of one
text always fall on the same side.
"""

import hashlib
import itertools
import multiprocessing
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atomic_lib.data.tokenizer_file import GPT2, TokenizerChoice

# A task is about 1 MiB of text, close to a second of work: long against the cost of handing it
# over, short against the updates of the progress bar.
TASK_CHARACTERS = 2**20
# Starting a process costs seconds; so little text is encoded sooner where it is.
PARALLEL_MIN_CHARACTERS = 16 * TASK_CHARACTERS
TASKS_AHEAD = 4  # a process; bounds the text in memory while a slow writer catches up


@dataclass(frozen=True, kw_only=True)
class EncodedSplit:
    """Consecutive documents of one split: ids uint16 (each document ends in the separator)."""

    tokens: NDArray[np.uint16]
    documents: int
    text_bytes: int  # UTF-8, separators not counted


@dataclass(frozen=True, kw_only=True)
class EncodedTask:
    """The two splits of one task, and what was odd about its documents."""

    train: EncodedSplit
    validation: EncodedSplit
    blank_documents: int  # left out
    repaired_documents: int  # with lone surrogates, which UTF-8 cannot hold: replaced by "?"
    characters: int


def in_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split; depends on its text alone."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def encode_task(
    texts: list[str], validation_fraction: float, choice: TokenizerChoice = GPT2
) -> EncodedTask:
    """Encodes documents with a tokenizer and packs each split."""
    tokenizer = choice.load()
    end = np.array([tokenizer.separator], dtype=np.uint16)
    tokens: dict[bool, list[NDArray[np.uint16]]] = {False: [], True: []}
    text_bytes = {False: 0, True: 0}
    blank = repaired = 0
    for text in texts:
        if not text.strip():
            blank += 1
            continue
        clean = text.encode("utf-8", "replace").decode("utf-8")
        repaired += clean != text
        validation = in_validation(clean, validation_fraction)
        tokens[validation] += [tokenizer.encode(clean), end]
        text_bytes[validation] += len(clean.encode("utf-8"))
    train, validation_split = (
        EncodedSplit(
            tokens=np.concatenate(tokens[key]) if tokens[key] else end[:0],
            documents=len(tokens[key]) // 2,
            text_bytes=text_bytes[key],
        )
        for key in (False, True)
    )
    return EncodedTask(
        train=train,
        validation=validation_split,
        blank_documents=blank,
        repaired_documents=repaired,
        characters=sum(map(len, texts)),
    )


def encode_documents(
    documents: Iterator[str],
    *,
    validation_fraction: float,
    workers: int,
    tokenizer: TokenizerChoice = GPT2,
) -> Generator[EncodedTask, None, None]:
    """Encodes documents in order. The result does not depend on `workers`.

    Up to PARALLEL_MIN_CHARACTERS of text are encoded in this process; a longer corpus is shared
    among `workers` processes, started afresh (a fork would copy a running JAX).
    """
    tasks = _tasks(documents)
    head: list[list[str]] = []
    characters = 0
    if workers > 1:
        for task in tasks:
            head.append(task)
            characters += sum(map(len, task))
            if characters >= PARALLEL_MIN_CHARACTERS:
                break
    tasks = itertools.chain(head, tasks)
    if characters < PARALLEL_MIN_CHARACTERS:
        for task in tasks:
            yield encode_task(task, validation_fraction, tokenizer)
    else:
        yield from _encode_in_processes(tasks, validation_fraction, workers, tokenizer)


def _encode_in_processes(
    tasks: Iterator[list[str]], validation_fraction: float, workers: int, tokenizer: TokenizerChoice
) -> Iterator[EncodedTask]:
    pool = ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn"))
    pending: deque[Future[EncodedTask]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(encode_task, task, validation_fraction, tokenizer))
            if len(pending) >= workers * TASKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a tokenising process ended before its work: the machine is out of memory, or the main "
            "script runs its work at import (put it under `if __name__ == '__main__':`, or pass "
            "workers=1)."
        ) from error
    finally:  # also when the caller has enough tokens and closes this generator
        pool.shutdown(cancel_futures=True)


def _tasks(documents: Iterator[str]) -> Iterator[list[str]]:
    """Groups documents into lists of about TASK_CHARACTERS."""
    task: list[str] = []
    characters = 0
    for text in documents:
        task.append(text)
        characters += len(text)
        if characters >= TASK_CHARACTERS:
            yield task
            task, characters = [], 0
    if task:
        yield task
