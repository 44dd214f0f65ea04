# SPDX-License-Identifier: Apache-2.0
"""`TokenDataset`: batches are a pure function of (seed, step), and what does not fit is refused.

Oracle: the files hold 0, 1, 2, ..., so that a window is known from its first token alone. Exact.
"""

import json

import numpy as np
import pytest

from atomic_lib.data import facts, open_token_folder

T = 16
WINDOWS = 996 // T  # 62 windows of 16 in 997 tokens


@pytest.fixture
def dataset(token_folder):
    return open_token_folder(token_folder, vocab_size=1000)


def first_tokens(dataset, steps, *, batch_size, seed=3):
    batches = [
        dataset.train_batch(seed, step, batch_size=batch_size, sequence_length=T) for step in steps
    ]
    return np.concatenate(batches)[:, 0]


@pytest.mark.parametrize("batch_size", [1, 5, 8, 70])
def test_train_batches_are_whole_windows_each_once_an_epoch(dataset, batch_size):
    steps = range(-(-2 * WINDOWS // batch_size))
    batch = dataset.train_batch(3, 0, batch_size=batch_size, sequence_length=T)
    assert batch.shape == (batch_size, T + 1)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(T + 1), (batch_size, 1)))
    starts = first_tokens(dataset, steps, batch_size=batch_size)
    for epoch in range(2):
        seen = starts[epoch * WINDOWS : (epoch + 1) * WINDOWS]
        assert sorted(seen.tolist()) == [T * i for i in range(WINDOWS)], f"epoch {epoch}"


def test_a_batch_depends_on_seed_and_step_alone(token_folder, dataset):
    again = open_token_folder(token_folder, vocab_size=1000)
    late = again.train_batch(3, 11, batch_size=8, sequence_length=T)
    dataset.train_batch(4, 2, batch_size=8, sequence_length=T)  # another call must not matter
    np.testing.assert_array_equal(late, dataset.train_batch(3, 11, batch_size=8, sequence_length=T))
    assert not np.array_equal(late, dataset.train_batch(4, 11, batch_size=8, sequence_length=T))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_that_read_their_rows_read_the_batch(dataset, processes):
    share = 8 // processes
    parts = [
        dataset.train_batch(
            3, 7, batch_size=8, sequence_length=T, rows=slice(p * share, (p + 1) * share)
        )
        for p in range(processes)
    ]
    whole = dataset.train_batch(3, 7, batch_size=8, sequence_length=T)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_validation_is_consecutive_windows_and_full_batches_only(dataset):
    batches = list(dataset.validation_batches(5, T))
    assert len(batches) == dataset.validation_batch_count(5, T) == (396 // T) // 5
    starts = np.concatenate(batches)[:, 0]
    assert starts.tolist() == [T * i for i in range(len(starts))]
    assert len(list(dataset.validation_batches(5, T, limit=2))) == 2


def test_llm_c_shards_are_read_one_after_the_other(tmp_path):
    def write(name, first, count):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, count
        ids = np.arange(first, first + count, dtype="<u2")
        (tmp_path / name).write_bytes(header.tobytes() + ids.tobytes())

    write("web_train_000001.bin", 0, 2 * T + 3)
    write("web_train_000002.bin", 500, 3 * T + 1)
    write("web_val_000000.bin", 0, 2 * T + 1)
    dataset = open_token_folder(tmp_path, vocab_size=1000)
    starts = np.sort(first_tokens(dataset, [0], batch_size=5))
    assert starts.tolist() == [0, T, 500, 500 + T, 500 + 2 * T]
    assert len(dataset.train) == 5 * T + 4
    assert [entry["layout"] for entry in dataset.manifest["train"]] == ["llm.c", "llm.c"]


def test_epochs_are_counted(dataset):
    assert dataset.train_epochs(31, batch_size=4, sequence_length=T) == 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.train_batch(0, 0, batch_size=0, sequence_length=T), "batch_size must be pos"),
        (lambda d: d.train_batch(0, 0, batch_size=1, sequence_length=0), "sequence_length must be"),
        (lambda d: d.train_batch(0, 0, batch_size=1, sequence_length=997),
         r"sequence_length: 997 needs 998 tokens.*train split.*has 997\. Choose at most 996"),
        (lambda d: d.validation_batch_count(25, T), r"validation split holds \(397 tokens, 24 win"),
        (lambda d: next(d.validation_batches(1, T, limit=0)), "limit must be positive"),
    ],
    ids=["batch", "length", "long", "few", "limit"],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(dataset, call, message):
    with pytest.raises(ValueError, match=message):
        call(dataset)


def test_an_id_outside_the_vocabulary_is_refused_on_opening(token_folder):
    with pytest.raises(ValueError, match=r"train\.bin holds id 996, but vocab_size is 996"):
        open_token_folder(token_folder, vocab_size=996)


def test_an_id_that_sampling_missed_is_refused_in_its_batch(token_folder, monkeypatch):
    monkeypatch.setattr(facts, "FULL_READ_LIMIT_BYTES", 100)
    monkeypatch.setattr(facts, "SAMPLE_BLOCK_BYTES", 2)
    ids = np.fromfile(token_folder / "train.bin", dtype="<u2")
    ids[500] = 60_000  # between two samples
    ids.tofile(token_folder / "train.bin")
    dataset = open_token_folder(token_folder, vocab_size=1000)
    assert dataset.manifest["train"][0]["ids_checked"] == 64
    with pytest.raises(ValueError, match="holds token id 60000, but vocab_size is 1000"):
        first_tokens(dataset, range(WINDOWS), batch_size=1)


@pytest.mark.parametrize(
    ("vocab_size", "name", "separator"),
    [(50_257, "gpt2", 50_256), (50_304, "gpt2", 50_256), (32_000, "unknown", None)],
)
def test_a_folder_without_manifest_says_which_tokenizer_is_assumed(
    token_folder, vocab_size, name, separator
):
    dataset = open_token_folder(token_folder, vocab_size=vocab_size)
    assert dataset.manifest["tokenizer"]["name"] == name
    assert dataset.separator == separator
    lengths = dataset.bytes_per_token()
    assert (lengths is None) == (name == "unknown")
    assert lengths is None or lengths.shape == (vocab_size,)
    json.dumps(dataset.manifest)


def test_a_foreign_manifest_is_ignored_and_a_newer_one_refused(token_folder):
    path = token_folder / "manifest.json"
    path.write_text('{"files": []}')
    assert open_token_folder(token_folder, vocab_size=1000).manifest["train"][0]["tokens"] == 997
    path.write_text('{"schema": "atomic-token-dataset/99"}')
    with pytest.raises(ValueError, match="schema 'atomic-token-dataset/99'; this version reads"):
        open_token_folder(token_folder, vocab_size=1000)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is no JSON"):
        open_token_folder(token_folder, vocab_size=1000)


def test_a_folder_without_token_files_says_what_it_holds(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"neither train\.bin .*holds \['model\.bin'\]"):
        open_token_folder(tmp_path, vocab_size=1000)
    with pytest.raises(FileNotFoundError, match="absent is no folder"):
        open_token_folder(tmp_path / "absent", vocab_size=1000)
