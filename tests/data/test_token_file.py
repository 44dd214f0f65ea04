# SPDX-License-Identifier: Apache-2.0
"""Token files: both layouts are read exactly, and each kind of damage is named.

Oracle: the files are written here byte by byte with `struct`, which the reader does not use;
windows are compared with slices of the Python list that was written. All exact.
"""

import hashlib
import struct

import numpy as np
import pytest

from atomic_lib.data import facts
from atomic_lib.data.facts import inspect_token_file
from atomic_lib.data.token_file import TokenFile

IDS = [(7919 * i) % 50_257 for i in range(301)]


def flat_bytes(ids):
    return struct.pack(f"<{len(ids)}H", *ids)


def shard_bytes(ids, *, magic=20240520, version=1, count=None):
    header = [magic, version, len(ids) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + flat_bytes(ids)


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "some.bin"
        path.write_bytes(content)
        return path

    return write_file


@pytest.mark.parametrize(("layout", "encode"), [("flat", flat_bytes), ("llm.c", shard_bytes)])
def test_both_layouts_give_the_ids_written(write, layout, encode):
    file = TokenFile.open(write(encode(IDS)))
    assert file.layout == layout
    assert len(file) == len(IDS)
    assert file.tokens.dtype == np.uint16
    assert file.tokens.tolist() == IDS


@pytest.mark.parametrize("sequence_length", [1, 7, 100, 300])
def test_a_window_ends_with_the_first_token_of_the_next(write, sequence_length):
    file = TokenFile.open(write(flat_bytes(IDS)))
    count = file.window_count(sequence_length)
    assert count == 300 // sequence_length
    windows = file.read_windows(np.arange(count)[::-1], sequence_length)
    assert windows.shape == (count, sequence_length + 1)
    assert windows.dtype == np.int32
    for row, index in enumerate(range(count - 1, -1, -1)):
        start = index * sequence_length
        assert windows[row].tolist() == IDS[start : start + sequence_length + 1]


def test_a_file_shorter_than_a_window_has_none(write):
    file = TokenFile.open(write(flat_bytes(IDS)))
    assert file.window_count(301) == 0
    with pytest.raises(IndexError, match=r"0\.\.0 are outside .*some.bin, which has 0 windows"):
        file.read_windows(np.array([0]), 301)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"some\.bin is empty"),
        (flat_bytes(IDS) + b"\0", r"some\.bin has 603 bytes, an odd number"),
        (shard_bytes(IDS, version=2), r"header version 2; only version 1"),
        (shard_bytes(IDS, count=400), r"counts 400 tokens, which makes 1824 bytes.*has 1626"),
        (shard_bytes(IDS)[:-2], r"counts 301 tokens, which makes 1626 bytes.*has 1624"),
        (shard_bytes([]), r"counts 0 tokens"),
        (shard_bytes(IDS)[:500], r"magic 20240520 but has only 500 bytes"),
    ],
    ids=["empty", "odd", "version", "count", "cut", "no tokens", "cut header"],
)
def test_damage_is_named(write, content, message):
    with pytest.raises(ValueError, match=message):
        TokenFile.open(write(content))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.bin does not exist"):
        TokenFile.open(tmp_path / "absent.bin")


def test_a_file_that_shrank_since_it_was_opened_is_refused_not_read(write):
    path = write(flat_bytes(IDS))
    file = TokenFile.open(path)
    with path.open("r+b") as handle:
        handle.truncate(100)
    with pytest.raises(RuntimeError, match=r"had 602 bytes when opened and has 100 now"):
        file.read_windows(np.array([0]), 8)


@pytest.mark.parametrize("encode", [flat_bytes, shard_bytes])
def test_facts_of_a_small_file_cover_all_of_it(write, encode):
    ids = [*IDS, 50_256, 3, 50_256]
    path = write(encode(ids))
    found = inspect_token_file(TokenFile.open(path), separator=50_256)
    assert found.tokens == found.ids_checked == len(ids)
    assert found.largest_id == 50_256
    assert found.documents == 2
    assert found.hash_method == "sha256"
    assert found.hash == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def small_samples(monkeypatch):
    """Files above 3,000 bytes are sampled, in blocks of 8 ids."""
    monkeypatch.setattr(facts, "FULL_READ_LIMIT_BYTES", 3_000)
    monkeypatch.setattr(facts, "SAMPLE_BLOCK_BYTES", 16)


@pytest.mark.parametrize("encode", [flat_bytes, shard_bytes])
def test_facts_of_a_large_file_say_that_they_are_a_sample(write, small_samples, encode):
    ids = [i % 1000 for i in range(3_000)]
    found = inspect_token_file(TokenFile.open(write(encode(ids))), separator=50_256)
    assert "64 blocks" in found.hash_method
    assert found.documents is None
    assert 0 < found.ids_checked <= 64 * 8
    assert found.largest_id < 1000, "the header is not read as ids"


@pytest.mark.parametrize(
    "change",
    [lambda ids: [1, *ids[1:]], lambda ids: [*ids[:-1], 1], lambda ids: ids[:-1]],
    ids=["first id", "last id", "size"],
)
def test_a_sampled_hash_sees_both_ends_and_the_size(write, small_samples, change):
    ids = [0] * 3_000
    before = inspect_token_file(TokenFile.open(write(flat_bytes(ids))), separator=None)
    after = inspect_token_file(TokenFile.open(write(flat_bytes(change(ids)))), separator=None)
    assert before.hash != after.hash
