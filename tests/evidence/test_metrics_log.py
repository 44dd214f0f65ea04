# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl keeps every row through kills, torn writes and full disks.

Oracle: hashlib and json applied to the file's bytes here, with the chain written out by hand, and
literal lists of rows; nothing of the log's own reader.
"""

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomic_lib.evidence import MetricsLog, effective_rows, read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def started(path: Path) -> MetricsLog:
    log = MetricsLog(path)
    log.start(run_id="train-smoke", tokens_per_step=8)
    return log


def lines_of(path: Path) -> list[dict]:
    """Rows as the json module reads them, after the chain was followed by hand."""
    previous = "0" * 64
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        row = json.loads(line)
        assert (row["row"], row["previous"]) == (number, previous)
        previous = hashlib.sha256(line).hexdigest()
        rows.append(row)
    return rows


def test_rows_are_numbered_chained_and_read_back(path: Path):
    log = started(path)
    returned = [log.append("train", step=n, loss=1.5, note="é") for n in (1, 2, 3)]
    rows = lines_of(path)
    assert [row["kind"] for row in rows] == ["header", "train", "train", "train"]
    assert rows[0]["schema"] == "atomic-metrics/1"
    assert rows[1:] == returned
    assert read_rows(path) == log.rows() == rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_become_null_and_are_marked(path: Path, value: float):
    started(path).append("train", step=1, loss=value, lr=0.1)
    row = lines_of(path)[1]
    assert (row["loss"], row["lr"], row["nonfinite"]) == (None, 0.1, True)


def test_array_scalars_are_numbers_in_the_file(path: Path):
    import numpy as np

    log = started(path)
    log.append("train", step=np.int32(3), loss=np.float32(0.5), finite=np.bool_(True))
    row = lines_of(path)[1]
    assert (row["step"], row["loss"], row["finite"]) == (3, 0.5, True)


def test_another_process_continues_the_chain(path: Path):
    started(path).append("train", step=1, tokens=8)
    log = MetricsLog(path)
    log.start(run_id="train-smoke", tokens_per_step=8)
    log.append("train", step=2, tokens=16)
    assert [row["kind"] for row in lines_of(path)] == ["header", "train", "train"]


@pytest.mark.parametrize("field", ["run_id", "tokens_per_step"])
def test_start_refuses_to_continue_another_configuration(path: Path, field: str):
    started(path)
    wanted = {"run_id": "train-smoke", "tokens_per_step": 8} | {field: 9}
    with pytest.raises(ValueError, match=rf"{field}: 9 differs from"):
        MetricsLog(path).start(**wanted)


def test_every_torn_last_line_is_cut_and_kept_in_an_event(path: Path):
    log = started(path)
    for step in (1, 2):
        log.append("train", step=step, tokens=8 * step)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [row.get("step") for row in read_rows(path)] == [None, 1]
        MetricsLog(path).resume()
        rows = lines_of(path)
        assert [row["kind"] for row in rows] == ["header", "train", "event"]
        assert (rows[2]["event"], rows[2]["cut_bytes"]) == ("repaired", end - last)
        assert rows[2]["cut_text"].encode() == whole[last:end]


def test_zeros_after_a_power_cut_are_a_torn_line(path: Path):
    started(path).append("train", step=1, tokens=8)
    with open(path, "ab") as file:
        file.write(bytes(100) + b"\n")
    log = MetricsLog(path)
    log.append("train", step=2, tokens=16)
    assert [row["kind"] for row in lines_of(path)] == ["header", "train", "event", "train"]


def test_torn_header_leaves_an_empty_log(path: Path):
    path.write_bytes(b'{"row": 1, "kind": "hea')
    started(path)
    assert [row["kind"] for row in lines_of(path)] == ["header"]


def test_changed_earlier_line_is_refused_on_resume_with_its_number(path: Path):
    log = started(path)
    for step in (1, 2, 3):
        log.append("train", step=step, tokens=8 * step)
    original = path.read_bytes()
    path.write_bytes(original.replace(b'"tokens": 16', b'"tokens": 17'))
    with pytest.raises(RuntimeError, match=r"metrics\.jsonl:4: does not carry the sha256"):
        MetricsLog(path).resume()
    path.write_bytes(original.replace(b'"tokens": 16', b'"tokens" 16'))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: "):
        MetricsLog(path).resume()


def test_full_disk_takes_the_row_back_and_the_log_goes_on(path: Path, monkeypatch):
    log = started(path)
    log.append("train", step=1, tokens=8)
    before = path.read_bytes()
    write = os.write

    def write_ten_bytes_then_fail(descriptor: int, data: bytes) -> int:
        if len(data) > 10 and data.startswith(b"{"):
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_ten_bytes_then_fail)
    with pytest.raises(OSError, match="No space left"):
        log.append("train", step=2, tokens=16)
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "write", write)
    log.append("train", step=2, tokens=16)
    assert [row.get("step") for row in lines_of(path)] == [None, 1, 2]


def test_unknown_kind_is_refused_before_anything_is_written(path: Path):
    with pytest.raises(ValueError, match="kind: 'trian' is not one of header, train"):
        MetricsLog(path).append("trian", step=1)
    assert not path.exists()


def test_killed_writer_loses_no_row_that_append_returned_from(path: Path):
    source = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from atomic_lib.evidence import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "log.start(run_id='train-smoke', tokens_per_step=8)\n"
        "for step in range(1, 200): log.append('train', step=step, tokens=8 * step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", source, str(path)], env=python_path())
    assert done.returncode == -9
    assert [row.get("step") for row in lines_of(path)][1:] == list(range(1, 200))


def python_path() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root}


def row(kind: str, **fields: object) -> dict[str, object]:
    return {"kind": kind, **fields}


def test_effective_rows_drop_what_each_resume_supersedes():
    rows = [
        row("header"), row("train", step=1), row("train", step=2), row("eval", step=2),
        row("train", step=3), row("event", event="repaired"),
        row("event", event="resume", step=2), row("train", step=3), row("eval", step=3),
        row("event", event="resume", step=0), row("train", step=1),
    ]  # fmt: skip
    first = rows[:4] + rows[5:9]
    assert effective_rows(rows[:9]) == first
    assert effective_rows(rows) == [rows[0], rows[5], rows[6], rows[9], rows[10]]
    assert effective_rows([]) == []
