# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: Python's own English text, local files, a Hugging Face dataset.

A `TextSource` names itself, fingerprints its content (the same content gives the same key, so a
built dataset is found again) and yields documents, one string each, always in the same order.
"""

import ast
import hashlib
import inspect
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.data.facts import FULL_HASH, hash_file
from atomic_lib.data.tokenizer import GPT2_SEPARATOR_TEXT

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")

# Folders of the standard library that hold tests, caches or other people's packages.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHORTEST_MODULE_TEXT = 200  # characters; shorter module documentation is a line or two


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Documents with a name and a fingerprint. `facts` go into the manifest as they are."""

    name: str
    fingerprint: str
    facts: dict[str, Any]
    documents: Callable[[], Iterator[str]]
    text_bytes: int | None = None  # of all files together, where known; for the progress bar


def builtin_source(stdlib: Path | None = None) -> TextSource:
    """The English text inside the running Python: its help topics and standard library docstrings.

    Needs no network. The text depends on the Python version alone; the fingerprint is the hash of
    the source files read. `stdlib` is the library's folder (None: the running interpreter's). The
    files are parsed, not imported.
    """
    folder = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    paths = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(path.relative_to(folder).parts)
    ]
    topics = folder / "pydoc_data" / "topics.py"
    if topics not in paths:
        raise FileNotFoundError(
            f"{topics} does not exist, so this Python has no built-in documentation to train on. "
            "Install the full standard library, or set corpus to a text file."
        )
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)

    def documents() -> Iterator[str]:
        yield from _help_topics(topics)
        for path in paths:
            if path != topics:
                text = _module_text(path, path.relative_to(folder))
                if len(text) >= _SHORTEST_MODULE_TEXT:
                    yield text

    return TextSource(
        name="builtin",
        fingerprint=digest.hexdigest(),
        facts={
            "kind": "builtin",
            "python": platform.python_version(),
            "source_files": len(paths),
            "sha256": digest.hexdigest(),
        },
        documents=documents,
    )


def _help_topics(path: Path) -> Iterator[str]:
    """The language reference behind `help("topics")`: each topic is a document."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            topics: dict[str, str] = ast.literal_eval(node.value)
            for _, text in sorted(topics.items()):
                yield text.strip() + "\n"


def _module_text(path: Path, relative: Path) -> str:
    """The docstrings of one module in source order, each under its dotted name."""
    parts = list(relative.with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    entries: list[str] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring and docstring.strip():
                entries.append(f"{name}\n\n{inspect.cleandoc(docstring)}\n")
            for child in node.body:
                visit(child, f"{name}.{getattr(child, 'name', '')}")

    visit(ast.parse(path.read_bytes(), filename=str(path)), module)
    return "\n\n".join(entries)


def file_source(path: Path, *, column: str = "text") -> TextSource:
    """Documents of one .txt, .jsonl or .parquet file, or of all such files below a folder.

    .txt: documents are separated by lines that hold only <|endoftext|>; a file without one is one
    document. .jsonl, .parquet: `column` of each object or row. Raises FileNotFoundError if there is
    no such file, and (while reading) ValueError for a line or table without that text.
    """
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.suffix in TEXT_SUFFIXES and p.is_file()]
        names = [p.relative_to(path).as_posix() for p in paths]
    else:
        paths = [path] if path.is_file() and path.suffix in TEXT_SUFFIXES else []
        names = [path.name]
    if not paths:
        raise FileNotFoundError(
            f"{path}: no {', '.join(TEXT_SUFFIXES)} file there to build a dataset from."
        )
    files, digest = [], hashlib.sha256(f"column {column}\n".encode())
    for name, item in zip(names, paths, strict=True):
        method, value = hash_file(item)
        size = item.stat().st_size
        digest.update(f"{name} {size} {method} {value}\n".encode())
        if method != FULL_HASH:  # a sample can miss an edit; the time of the edit does not
            digest.update(f"modified {item.stat().st_mtime_ns}\n".encode())
        files.append({"file": name, "bytes": size, "hash_method": method, "hash": value})

    all_plain = all(item.suffix == ".txt" for item in paths)

    def documents() -> Iterator[str]:
        for item in paths:
            yield from _READERS[item.suffix](item, column)

    return TextSource(
        name=path.stem,
        fingerprint=digest.hexdigest(),
        facts={"kind": "files", "path": str(path), "column": column, "files": files},
        documents=documents,
        text_bytes=sum(item.stat().st_size for item in paths) if all_plain else None,
    )


def _text_documents(path: Path, column: str) -> Iterator[str]:
    lines: list[str] = []
    # newline="\n": keep "\r" as it is, so that the bytes of a text are the bytes of its file.
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.strip() == GPT2_SEPARATOR_TEXT:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    yield "".join(lines)


def _json_documents(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is no JSON object: {error}") from error
            yield _text_of(row, column, f"{path} line {number}")


def _parquet_documents(path: Path, column: str) -> Iterator[str]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {column!r}; it has {sorted(file.schema_arrow.names)}. "
                "Name the one with the text: corpus '<path>?column=<name>'."
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield _text_of({column: value}, column, f"{path} row {row}")
                row += 1


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _text_documents,
    ".jsonl": _json_documents,
    ".parquet": _parquet_documents,
}


def _text_of(row: Any, column: str, place: str) -> str:
    """row[column], refused unless it is a string."""
    value = row.get(column) if isinstance(row, dict) else None
    if not isinstance(value, str):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{place}: no text under {column!r} (found {found}). Name the right one: corpus "
            "'<path>?column=<name>'."
        )
    return value


def huggingface_source(
    path: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    revision: str | None = None,
) -> TextSource:
    """Documents of a Hugging Face dataset (hub name, or a local folder), streamed.

    The fingerprint holds the library's hash of the dataset's files (on the hub that includes the
    commit), so that a new revision is built anew. Raises ValueError for an unknown split or column,
    FileNotFoundError for a dataset that does not exist or cannot be reached.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(path, config, revision=revision)
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise FileNotFoundError(
            f"corpus: the Hugging Face dataset {path!r} cannot be opened ({error}). Check its name "
            "and this machine's network, or give the path of its parquet files instead."
        ) from error
    splits = builder.info.splits
    if splits and split not in splits:
        raise ValueError(f"split: {split!r} is not in {path}; it has {sorted(splits)}.")
    identity = json.dumps([path, config, split, column, revision, builder.hash])

    def documents() -> Iterator[str]:
        stream = datasets.load_dataset(path, config, split=split, revision=revision, streaming=True)
        for number, row in enumerate(stream):
            yield _text_of(row, column, f"dataset {path} row {number}")

    return TextSource(
        name=path.rstrip("/").split("/")[-1] + (f"-{config}" if config else ""),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        facts={
            "kind": "huggingface",
            "path": path,
            "config": config,
            "split": split,
            "column": column,
            "revision": revision,
            "dataset_hash": builder.hash,
            "datasets": datasets.__version__,
        },
        documents=documents,
    )
