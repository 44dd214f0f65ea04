# SPDX-License-Identifier: Apache-2.0
"""Building a dataset: what the files hold, that it happens once, and what a failure leaves behind.

Oracle: the token stream is decoded again and cut at the separators, which must give back each
document that went in (in order, split by the sha256 rule computed here anew). Exact.
"""

import hashlib
import itertools
import json

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from atomic_lib.data import (
    TextSource,
    build_dataset,
    encode,
    gpt2_tokenizer,
    open_token_folder,
    sources,
)
from atomic_lib.data.sources import builtin_source, file_source, huggingface_source

SEPARATOR = 50_256


def source_of(documents, *, name="made", fingerprint="1"):
    return TextSource(
        name=name, fingerprint=fingerprint, facts={}, documents=lambda: iter(documents)
    )


def decoded(path):
    """The documents of a flat token file."""
    ids = np.fromfile(path, dtype="<u2").tolist()
    assert ids[-1] == SEPARATOR
    groups = itertools.groupby(ids, lambda i: i == SEPARATOR)
    return [gpt2_tokenizer().decode(list(group)) for is_end, group in groups if not is_end]


def held_out(text, fraction):
    first = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
    return first / 16**16 < fraction


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_each_document_lands_in_its_split_and_ends_in_the_separator(tmp_path, documents, fraction):
    folder = build_dataset(source_of(documents), data_folder=tmp_path, validation_fraction=fraction)
    train = [text for text in documents if not held_out(text, fraction)]
    validation = [text for text in documents if held_out(text, fraction)]
    assert train
    assert validation
    assert decoded(folder / "train.bin") == train
    assert decoded(folder / "val.bin") == validation
    manifest = open_token_folder(folder, vocab_size=50_257).manifest
    assert manifest["train"][0]["documents"] == len(train)
    assert manifest["text_bytes"]["validation"] == sum(len(t.encode()) for t in validation)
    assert manifest["tokenizer"]["vocab_size"] == 50_257


def test_processes_give_the_files_of_one_process(tmp_path, documents, monkeypatch):
    one = build_dataset(source_of(documents), data_folder=tmp_path / "one", workers=1)
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 500)
    monkeypatch.setattr(encode, "PARALLEL_MIN_CHARACTERS", 1000)
    two = build_dataset(source_of(documents), data_folder=tmp_path / "two", workers=2)
    for name in ("train.bin", "val.bin", "manifest.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_a_dataset_is_built_once_for_one_content(tmp_path, documents):
    calls = []

    def source(fingerprint):
        def read():
            calls.append(fingerprint)
            return iter(documents)

        return TextSource(name="made", fingerprint=fingerprint, facts={}, documents=read)

    first = build_dataset(source("1"), data_folder=tmp_path)
    assert build_dataset(source("1"), data_folder=tmp_path) == first
    assert calls == ["1"]
    others = {
        build_dataset(source("2"), data_folder=tmp_path),
        build_dataset(source("1"), data_folder=tmp_path, validation_fraction=0.3),
        build_dataset(source("1"), data_folder=tmp_path, max_tokens=10**6),
    }
    assert len(others | {first}) == 4


def test_a_failed_build_leaves_nothing_that_looks_built(tmp_path, documents):
    def failing():
        yield from documents
        raise OSError("disk gone")

    source = TextSource(name="made", fingerprint="1", facts={}, documents=failing)
    with pytest.raises(OSError, match="disk gone"):
        build_dataset(source, data_folder=tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_a_killed_builder_left_is_replaced(tmp_path, documents):
    folder = build_dataset(source_of(documents), data_folder=tmp_path)
    content = (folder / "train.bin").read_bytes()
    scratch = tmp_path / f".{folder.name}.building"
    folder.rename(scratch)  # as if the process had died before the rename
    (scratch / "train.bin").write_bytes(content[:11])
    assert build_dataset(source_of(documents), data_folder=tmp_path) == folder
    assert (folder / "train.bin").read_bytes() == content
    assert not scratch.exists()


def test_a_damaged_dataset_is_refused_by_name(tmp_path, documents):
    folder = build_dataset(source_of(documents), data_folder=tmp_path)
    content = bytearray((folder / "val.bin").read_bytes())
    content[6] ^= 1
    (folder / "val.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"val\.bin: hash is .*manifest\.json records"):
        open_token_folder(folder, vocab_size=50_257)


def test_max_tokens_stops_the_reading(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 500)
    read = []

    def endless():
        for text in itertools.cycle(documents):
            read.append(text)
            yield text

    source = TextSource(name="endless", fingerprint="1", facts={}, documents=endless)
    folder = build_dataset(source, data_folder=tmp_path, max_tokens=1000, workers=1)
    dataset = open_token_folder(folder, vocab_size=50_257)
    assert 1000 <= len(dataset.train) + len(dataset.validation) < 1500
    assert len(read) < 100


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_documents_are_split_by_tokens_and_it_is_recorded(tmp_path, documents, count):
    texts = [text for text in documents if not held_out(text, 0.1)][:count]
    folder = build_dataset(source_of(texts), data_folder=tmp_path)
    train, validation = (np.fromfile(folder / name, "<u2") for name in ("train.bin", "val.bin"))
    assert len(validation) == round(0.1 * (len(train) + len(validation)))
    joined = np.concatenate([train, validation]).tolist()
    expected = [i for text in texts for i in [*gpt2_tokenizer().encode(text).tolist(), SEPARATOR]]
    assert joined == expected
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["split"]["method"].startswith("the last tokens")


def test_blank_documents_are_left_out_and_lone_surrogates_replaced(tmp_path, documents):
    odd = [*documents, "", " \n", "half \ud83d pair"]
    folder = build_dataset(source_of(odd), data_folder=tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["blank_documents"] == 2
    assert manifest["repaired_documents"] == 1
    texts = decoded(folder / "train.bin") + decoded(folder / "val.bin")
    assert len(texts) == len(documents) + 1
    assert "half ? pair" in texts


def test_progress_is_reported(tmp_path, documents):
    reports = []
    build_dataset(
        source_of(documents), data_folder=tmp_path, progress=lambda *report: reports.append(report)
    )
    stage, done, total, text = reports[-1]
    assert (stage, total) == ("tokenise", 0)
    assert done > 0
    assert f"{done:,} tokens" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_fraction": 0.0}, r"validation_fraction must be in \(0, 1\), got 0\.0"),
        ({"validation_fraction": 1.0}, "validation_fraction must be"),
        ({"max_tokens": 0}, "max_tokens must be positive, got 0"),
        ({"workers": -1}, "workers must be positive, got -1"),
    ],
    ids=str,
)
def test_values_that_build_nothing_are_refused(tmp_path, documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        build_dataset(source_of(documents), data_folder=tmp_path, **arguments)


def test_a_source_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="source 'made' gave 0 tokens"):
        build_dataset(source_of([" "]), data_folder=tmp_path)


def test_text_files_are_cut_at_separator_lines_only(tmp_path):
    path = tmp_path / "two.txt"
    path.write_bytes(b"first\r\n\r\nstill first\n<|endoftext|>\nsecond <|endoftext|> inside")
    assert list(file_source(path).documents()) == [
        "first\r\n\r\nstill first\n",
        "second <|endoftext|> inside",
    ]


def test_a_folder_gives_all_its_texts_in_the_order_of_their_names(tmp_path, documents):
    (tmp_path / "b").mkdir()
    rows = [json.dumps({"text": text, "id": i}) for i, text in enumerate(documents[:3])]
    (tmp_path / "b" / "rows.jsonl").write_text("\n".join(rows) + "\n\n")
    parquet.write_table(pyarrow.table({"text": documents[3:6]}), tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text(documents[6])
    (tmp_path / "ignored.csv").write_text("x")
    assert list(file_source(tmp_path).documents()) == [documents[6], *documents[:6]]


def test_the_fingerprint_of_files_follows_their_content_not_their_place(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "x" / "a.txt").write_text("one")
    first = file_source(tmp_path / "a.txt").fingerprint
    assert file_source(tmp_path / "x" / "a.txt").fingerprint == first
    assert file_source(tmp_path / "a.txt", column="body").fingerprint != first
    (tmp_path / "a.txt").write_text("two")
    assert file_source(tmp_path / "a.txt").fingerprint != first


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": 3}', r"a\.jsonl line 2: no text under 'text'"),
        ("a.jsonl", '{"body": "x"}', r"line 1: no text under 'text' \(found \['body'\]\)"),
        ("a.jsonl", '{"text": "x"', r"a\.jsonl line 1 is no JSON object"),
        ("a.jsonl", '"text"', r"line 1: no text under 'text' \(found str\)"),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(file_source(tmp_path / name).documents())


def test_a_table_without_the_column_is_named(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet has no column 'text'; it has \['body'\]"):
        list(file_source(tmp_path / "t.parquet").documents())
    assert list(file_source(tmp_path / "t.parquet", column="body").documents()) == ["x"]


def test_the_builtin_corpus_is_english_and_the_same_each_time():
    one, two = builtin_source(), builtin_source()
    assert one.fingerprint == two.fingerprint
    first = list(itertools.islice(one.documents(), 80))  # the help topics and a module or so
    assert first == list(itertools.islice(two.documents(), 80))
    text = "\n".join(first)
    assert len(text) > 400_000
    assert text.count(" the ") > 3_000  # 3,399 in Python 3.11; about one word in twenty


def test_module_text_holds_every_docstring_under_its_name(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'b': 'Second', 'a': 'First'}")
    (tmp_path / "pkg" / "__init__.py").write_text(
        '"""About pkg."""\nclass A:\n    """An A."""\n    def f(self):\n'
        f'        """{"x" * 300}"""\n'
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(f'"""{"y" * 300}"""')
    documents = list(sources.builtin_source(tmp_path).documents())
    assert documents[:2] == ["First\n", "Second\n"]
    assert documents[2:] == [f"pkg\n\nAbout pkg.\n\n\npkg.A\n\nAn A.\n\n\npkg.A.f\n\n{'x' * 300}\n"]


def test_a_hugging_face_dataset_is_streamed_from_local_files(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = tmp_path / "corpus"
    (corpus / "data").mkdir(parents=True)
    datasets.Dataset.from_dict({"body": documents}).to_parquet(corpus / "data" / "train.parquet")
    source = huggingface_source(str(corpus), column="body")
    assert list(source.documents()) == documents
    folder = build_dataset(source, data_folder=tmp_path / "built")
    assert folder.name.startswith("corpus-")
    texts = decoded(folder / "train.bin") + decoded(folder / "val.bin")
    assert sorted(texts) == sorted(documents)
    with pytest.raises(ValueError, match=r"row 0: no text under 'text' \(found \['body'\]\)"):
        next(huggingface_source(str(corpus)).documents())
