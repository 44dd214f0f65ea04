# SPDX-License-Identifier: Apache-2.0
"""The `corpus` parameter: each kind is found where it lies, and errors say what was found.

Oracle: folders made here in the layouts that Kaggle mounts; the opened dataset must be the one put
there.
"""

import shutil

import numpy as np
import pytest

from atomic_lib.data import open_dataset, parse_corpus

MOUNTS = [
    "openwebtext-gpt2",
    "datasets/windmaple/openwebtext-gpt2",
    "datasets/windmaple/openwebtext-gpt2/versions/3",
]


@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize(
    "corpus", ["windmaple/openwebtext-gpt2", "kaggle:windmaple/openwebtext-gpt2"]
)
def test_a_kaggle_dataset_is_found_in_each_layout(tmp_path, token_folder, mount, corpus):
    inputs = tmp_path / "input"
    shutil.copytree(token_folder, inputs / mount)
    dataset = open_dataset(
        corpus, vocab_size=50_257, root=tmp_path / "root", kaggle_inputs=(inputs,)
    )
    assert dataset.folder == inputs / mount
    assert len(dataset.train) == 997


def test_a_kaggle_dataset_that_is_not_mounted_lists_what_is(tmp_path):
    inputs = tmp_path / "input"
    (inputs / "datasets" / "somebody" / "other").mkdir(parents=True)
    (inputs / "openwebtext-gpt2").mkdir()
    (inputs / "openwebtext-gpt2" / "train.bin").touch()
    with pytest.raises(FileNotFoundError) as error:
        open_dataset(
            "windmaple/openwebtext-gpt2",
            vocab_size=50_257,
            root=tmp_path,
            kaggle_inputs=(inputs, tmp_path / "absent"),
        )
    message = str(error.value)
    assert "windmaple/openwebtext-gpt2 is not mounted" in message
    assert str(inputs / "datasets/somebody/other") in message
    assert str(inputs / "openwebtext-gpt2/train.bin") in message
    assert f"no folder {tmp_path / 'absent'}" in message


def test_a_folder_of_tokens_is_opened_from_a_relative_or_absolute_path(tmp_path, token_folder):
    for corpus in ("tokens", f"path:{token_folder}", str(token_folder)):
        assert open_dataset(corpus, vocab_size=1000, root=tmp_path).folder == token_folder


def test_an_existing_folder_named_like_a_kaggle_dataset_wins(tmp_path, token_folder):
    shutil.copytree(token_folder, tmp_path / "owner" / "slug")
    dataset = open_dataset("owner/slug", vocab_size=1000, root=tmp_path, kaggle_inputs=())
    assert dataset.folder == tmp_path / "owner" / "slug"


def test_text_is_built_below_the_root_and_options_are_used(tmp_path, documents):
    rows = "".join(f'{{"body": "{text.strip()}"}}\n'.replace("\nN", " N") for text in documents)
    (tmp_path / "notes.jsonl").write_text(rows)
    corpus = "notes.jsonl?column=body&validation_fraction=0.5"
    dataset = open_dataset(corpus, vocab_size=50_257, root=tmp_path)
    assert dataset.folder.parent == tmp_path / "data"
    assert dataset.folder.name.startswith("notes-")
    assert dataset.manifest["split"]["validation_fraction"] == 0.5
    assert dataset.manifest["train"][0]["documents"] < 35
    other = open_dataset(
        corpus, vocab_size=50_257, root=tmp_path, data_folder=tmp_path / "elsewhere"
    )
    assert other.folder == tmp_path / "elsewhere" / dataset.folder.name


def test_gpt2_text_is_refused_for_a_smaller_vocabulary(tmp_path, documents):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    with pytest.raises(ValueError, match="holds id 50256, but vocab_size is 32000"):
        open_dataset("a.txt", vocab_size=32_000, root=tmp_path)


@pytest.mark.parametrize("corpus", ["absent.txt", "path:absent", "some/where/else"])
def test_a_path_that_does_not_exist_is_named(tmp_path, corpus):
    with pytest.raises(FileNotFoundError, match=r"corpus: '.*' does not exist below"):
        open_dataset(corpus, vocab_size=1000, root=tmp_path)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("hugingface:a/b", "unknown kind 'hugingface'"),
        ("kaggle:slug", "must be 'kaggle:<owner>/<slug>'"),
        ("huggingface:", "names nothing"),
        ("", "names nothing"),
        ("a.jsonl?colum=x", "unknown option 'colum'; did you mean 'column'"),
        ("builtin?column=x", "unknown option 'column'"),
        ("a.txt?max_tokens=1e9", "max_tokens must be a number, got '1e9'"),
        ("a.txt?validation_fraction=tenth", "validation_fraction must be a number"),
        ("a.txt?column", "bad query field"),
        ("a.txt?tokenizer=t.json", "tokenizer and separator go together"),
        ("builtin?separator=</s>", "tokenizer and separator go together"),
    ],
)
def test_a_corpus_that_cannot_be_is_refused_before_any_file_is_touched(corpus, message):
    with pytest.raises(ValueError, match=message):
        parse_corpus(corpus)


def test_bytes_of_a_built_dataset_are_the_bytes_of_its_text(tmp_path, documents):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    dataset = open_dataset("a.txt", vocab_size=50_304, root=tmp_path)
    lengths = dataset.bytes_per_token()
    assert lengths is not None
    for split in (dataset.train, dataset.validation):
        total = int(lengths[np.fromfile(split.files[0].path, dtype="<u2")].sum())
        assert total == dataset.manifest["text_bytes"][split.name], split.name
