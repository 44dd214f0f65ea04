# SPDX-License-Identifier: Apache-2.0
"""From the `corpus` parameter to a `TokenDataset`.

    builtin                          English text inside the running Python; no network
    <path>                           a folder of token files, or .txt/.jsonl/.parquet text
    kaggle:<owner>/<slug>            token files of a mounted Kaggle dataset
    huggingface:<owner>/<name>       a dataset of the Hugging Face hub, streamed
    <owner>/<slug>                   the path if it exists below the root, else the Kaggle dataset
Text may carry options as in a URL: "huggingface:HuggingFaceFW/fineweb-edu?config=sample-10BT&
max_tokens=1000000000", "notes.jsonl?column=body". It is encoded with GPT-2's tokenizer, or with any
other: "?tokenizer=<tokenizer.json or <owner>/<model> of the hub>&separator=</s>". See OPTIONS.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from atomic_lib.data.build import SPLIT_FILES, Progress, build_dataset
from atomic_lib.data.dataset import TokenDataset, open_token_folder
from atomic_lib.data.sources import (
    TEXT_SUFFIXES,
    TextSource,
    builtin_source,
    file_source,
    huggingface_source,
)
from atomic_lib.data.tokenizer_file import GPT2, TokenizerChoice, choose_tokenizer

KAGGLE_INPUTS = (Path("/kaggle/input"),)
CACHE_FOLDER = "data"  # below the root

# Options of each kind of text corpus.
_BUILD_OPTIONS = ("validation_fraction", "max_tokens", "tokenizer", "separator")
OPTIONS: dict[str, tuple[str, ...]] = {
    "builtin": _BUILD_OPTIONS,
    "path": ("column", *_BUILD_OPTIONS),
    "kaggle": (),
    "huggingface": ("config", "split", "column", "revision", *_BUILD_OPTIONS),
    "auto": ("column", *_BUILD_OPTIONS),
}


@dataclass(frozen=True, kw_only=True)
class CorpusName:
    """A parsed `corpus` parameter. kind "auto" is a path if that exists, else a Kaggle dataset."""

    kind: str
    name: str
    options: dict[str, str] = field(default_factory=dict)


def parse_corpus(corpus: str) -> CorpusName:
    """Parses a `corpus` parameter. Touches no file.

    Raises ValueError for an empty name, an unknown kind or option (offering the nearest), or an
    option's value that is no number where one is needed.
    """
    address, _, query = corpus.partition("?")
    kind, colon, name = address.partition(":")
    if not colon:
        kind, name = ("builtin", "builtin") if address == "builtin" else ("auto", address)
    if kind not in OPTIONS:
        raise ValueError(
            f"corpus: {corpus!r} has the unknown kind {kind!r}; the kinds are 'builtin', "
            "'path:...', 'kaggle:<owner>/<slug>', 'huggingface:<owner>/<name>' or a plain path."
        )
    if not name:
        raise ValueError(f"corpus: {corpus!r} names nothing; write what follows {kind!r}.")
    if kind == "kaggle" and name.count("/") != 1:
        raise ValueError(f"corpus: {corpus!r} must be 'kaggle:<owner>/<slug>'.")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    for option in options:
        if option not in OPTIONS[kind]:
            near = difflib.get_close_matches(option, OPTIONS[kind], n=1)
            raise ValueError(
                f"corpus: {corpus!r} has the unknown option {option!r}; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"Options here: {', '.join(OPTIONS[kind]) or 'none'}."
            )
    for option, kind_of_number in (("max_tokens", int), ("validation_fraction", float)):
        if option in options:
            try:
                kind_of_number(options[option])
            except ValueError as error:
                raise ValueError(
                    f"corpus: {corpus!r}: {option} must be a number, got {options[option]!r}."
                ) from error
    if ("tokenizer" in options) != ("separator" in options):
        raise ValueError(
            f"corpus: {corpus!r}: tokenizer and separator go together; the separator is the text "
            "of the token that ends a document, as in '&separator=</s>'."
        )
    return CorpusName(kind=kind, name=name, options=options)


def open_dataset(
    corpus: str,
    *,
    vocab_size: int,
    root: str | os.PathLike[str],
    data_folder: Path | None = None,
    kaggle_inputs: Sequence[Path] = KAGGLE_INPUTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TokenDataset:
    """Opens the dataset that `corpus` names; text is tokenised on first use and kept.

    vocab_size: the model's; no id may reach it. root: relative paths start here, and built datasets
    lie in `data_folder` (None: root/data). kaggle_inputs: folders that Kaggle mounts datasets in.
    progress: called as (stage, done, total or 0, text) while a dataset is built. Raises
    ValueError or FileNotFoundError as `parse_corpus`, `build_dataset`, `open_token_folder` and
    `find_kaggle_dataset` do.
    """
    root = Path(root)
    parsed = parse_corpus(corpus)
    folder = _token_folder(parsed, root, kaggle_inputs)
    if folder is None:
        options = parsed.options
        folder = build_dataset(
            _text_source(parsed, root),
            data_folder=root / CACHE_FOLDER if data_folder is None else data_folder,
            validation_fraction=float(options.get("validation_fraction", 0.1)),
            max_tokens=int(options["max_tokens"]) if "max_tokens" in options else None,
            tokenizer=_tokenizer(options, root),
            workers=workers,
            progress=progress,
        )
    return open_token_folder(folder, vocab_size=vocab_size)


def kaggle_dataset(corpus: str) -> str | None:
    """The "<owner>/<slug>" that a `corpus` parameter takes from Kaggle, or None. Touches no file.

    A plain "<owner>/<slug>" counts. Raises as `parse_corpus` does.
    """
    parsed = parse_corpus(corpus)
    if parsed.kind == "kaggle" or (parsed.kind == "auto" and _is_owner_and_slug(parsed.name)):
        return parsed.name
    return None


def find_kaggle_dataset(owner: str, slug: str, kaggle_inputs: Sequence[Path]) -> Path:
    """The folder that holds train.bin and val.bin of a mounted Kaggle dataset.

    Kaggle mounts at <input>/<slug> or <input>/datasets/<owner>/<slug>; the files may lie deeper
    (a version folder). Raises FileNotFoundError that lists what was found instead.
    """
    for inputs in kaggle_inputs:
        for mount in (inputs / slug, inputs / "datasets" / owner / slug):
            for train in sorted(mount.rglob(SPLIT_FILES["train"])):
                if (train.parent / SPLIT_FILES["validation"]).is_file():
                    return train.parent
    raise FileNotFoundError(
        f"Kaggle dataset {owner}/{slug} is not mounted: no "
        + " and ".join(SPLIT_FILES.values())
        + " under "
        + " or ".join(f"{i / slug} or {i / 'datasets' / owner / slug}" for i in kaggle_inputs)
        + f". Found {_listing(kaggle_inputs)}. Attach it to the notebook (Add Input), or set "
        "corpus to 'builtin', a path, or 'huggingface:<owner>/<name>'."
    )


def _listing(folders: Sequence[Path]) -> str:
    """What lies in these folders, three levels deep, shortened to 30 entries."""
    lines = []
    for folder in folders:
        if not folder.is_dir():
            lines.append(f"no folder {folder}")
            continue
        found = sorted(p for depth in ("*", "*/*", "*/*/*") for p in folder.glob(depth))
        lines += [str(path) for path in found] or [f"nothing in {folder}"]
    return ", ".join(lines[:30]) + (f" and {len(lines) - 30} more" if len(lines) > 30 else "")


def _token_folder(parsed: CorpusName, root: Path, kaggle_inputs: Sequence[Path]) -> Path | None:
    """The folder of ready token files that a corpus names, or None if it names text."""
    path = root / Path(parsed.name).expanduser()
    if parsed.kind in ("path", "auto") and path.exists():
        if path.is_dir() and not any(p.suffix in TEXT_SUFFIXES for p in path.rglob("*")):
            return path
        return None
    if parsed.kind == "kaggle" or (parsed.kind == "auto" and _is_owner_and_slug(parsed.name)):
        owner, slug = parsed.name.split("/")
        return find_kaggle_dataset(owner, slug, kaggle_inputs)
    if parsed.kind in ("path", "auto"):
        raise FileNotFoundError(
            f"corpus: {parsed.name!r} does not exist below {root}. Give the path of a folder with "
            f"train.bin and val.bin, of a {', '.join(TEXT_SUFFIXES)} file, 'builtin', "
            "'kaggle:<owner>/<slug>' or 'huggingface:<owner>/<name>'."
        )
    return None


def _is_owner_and_slug(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).suffix


def _tokenizer(options: dict[str, str], root: Path) -> TokenizerChoice:
    if "tokenizer" not in options:
        return GPT2
    return choose_tokenizer(options["tokenizer"], options["separator"], root)


def _text_source(parsed: CorpusName, root: Path) -> TextSource:
    if parsed.kind == "builtin":
        return builtin_source()
    options = {k: v for k, v in parsed.options.items() if k not in _BUILD_OPTIONS}
    if parsed.kind == "huggingface":
        return huggingface_source(parsed.name, **options)
    return file_source(root / Path(parsed.name).expanduser(), **options)
