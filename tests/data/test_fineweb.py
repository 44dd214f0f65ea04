# SPDX-License-Identifier: Apache-2.0
"""FineWeb-Edu as a corpus, from files in its own layout: folders of parquet files with its columns.

Oracle: the packed ids are decoded by the tokenizers library itself and cut at the separators, which
must give the documents that went in; the split rule is computed anew. No network: the hub is either
a local folder or one that refuses.
"""

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atomic_lib.data import encode, open_dataset
from atomic_lib.data.encode import in_validation

END = "</s>"


@pytest.fixture
def fineweb(tmp_path, documents):
    """Two parquet files as FineWeb-Edu has them, and a tokenizer.json with 300 tokens."""
    texts = [*documents, f"What {END} looks like inside a document."]
    for number, part in enumerate((texts[:25], texts[25:])):
        folder = tmp_path / "fineweb-edu" / "sample" / "10BT"
        folder.mkdir(parents=True, exist_ok=True)
        columns = {
            "text": part,
            "id": [f"<urn:uuid:{number}-{i}>" for i in range(len(part))],
            "score": [3.5] * len(part),
            "token_count": [len(text) // 4 for text in part],
        }
        parquet.write_table(pyarrow.table(columns), folder / f"{number:03d}_00000.parquet")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", END], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    return texts


def decoded(folder, name, tokenizer):
    ids = np.fromfile(folder / name, dtype="<u2")
    assert ids[-1] == 2
    documents = np.split(ids, np.flatnonzero(ids == 2) + 1)[:-1]
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


@pytest.mark.parametrize("workers", [1, 2])
def test_parquet_files_are_packed_with_any_tokenizer(tmp_path, fineweb, workers, monkeypatch):
    if workers == 2:
        monkeypatch.setattr(encode, "TASK_CHARACTERS", 500)
        monkeypatch.setattr(encode, "PARALLEL_MIN_CHARACTERS", 1000)
    dataset = open_dataset(
        f"fineweb-edu?tokenizer=tokenizer.json&separator={END}&validation_fraction=0.3",
        vocab_size=300, root=tmp_path, workers=workers,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    train = [text for text in fineweb if not in_validation(text, 0.3)]
    validation = [text for text in fineweb if in_validation(text, 0.3)]
    assert decoded(dataset.folder, "train.bin", tokenizer) == train
    assert decoded(dataset.folder, "val.bin", tokenizer) == validation
    assert dataset.separator == 2
    assert dataset.manifest["tokenizer"]["name"] == "tokenizer.json"
    assert dataset.manifest["tokenizer"]["vocab_size"] == 300
    assert dataset.manifest["train"][0]["documents"] == len(train)
    assert dataset.bytes_per_token() is None  # known for GPT-2's vocabulary only


def test_the_tokenizer_is_part_of_a_datasets_identity(tmp_path, fineweb):
    corpus = "fineweb-edu?tokenizer=tokenizer.json&separator="
    folders = {
        open_dataset(name, vocab_size=50_257, root=tmp_path).folder
        for name in ("fineweb-edu", corpus + END, corpus + "<s>")
    }
    assert len(folders) == 3


def test_the_hub_is_streamed_by_name_up_to_a_number_of_tokens(tmp_path, fineweb, monkeypatch):
    """The name is a local folder here: what `datasets` does with it is the same."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 500)
    told = []
    dataset = open_dataset(
        f"huggingface:{tmp_path}/fineweb-edu?max_tokens=900", vocab_size=50_257, root=tmp_path,
        workers=1, progress=lambda *report: told.append(report),
    )  # fmt: skip
    tokens = len(dataset.train) + len(dataset.validation)
    assert 900 <= tokens < 1_300
    assert told[-1][:3] == ("tokenise", tokens, 900)
    assert dataset.manifest["source"]["kind"] == "huggingface"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("tokenizer=tokenizer.json&separator=<end>", ValueError, "'<end>' is no token of"),
        ("tokenizer=fineweb-edu&separator=</s>", FileNotFoundError, "no file below .* hub did not"),
        ("tokenizer=owner/model&separator=</s>", FileNotFoundError, "no file below .* hub did not"),
        ("tokenizer=broken.json&separator=</s>", ValueError, "is no tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(
    tmp_path, fineweb, monkeypatch, options, error, message
):
    def refuse(*arguments):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(error, match=message):
        open_dataset(f"fineweb-edu?{options}", vocab_size=300, root=tmp_path)


def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(FileNotFoundError, match=r"fineweb-edu' cannot be opened .* parquet files"):
        open_dataset("huggingface:HuggingFaceFW/fineweb-edu", vocab_size=300, root=tmp_path)
