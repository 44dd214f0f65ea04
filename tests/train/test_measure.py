# SPDX-License-Identifier: Apache-2.0
"""Protects the two measurements that the README quotes: that they run, and what they divide.

The model is `tiny`, so the numbers mean nothing here; the relations between them must hold.
"""

import re
import time

import pytest
import tiny
from tiny_runs import make_config

from atomic_lib.train import measure, session
from atomic_lib.train.loop import Loop

SMALL_MODEL = {"vocab_size": tiny.VOCABULARY, "num_blocks": 1}

pytestmark = pytest.mark.usefixtures("tiny_model")


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(measure, "build_program", session.build_program)
    return {}


def number(text):
    return float(re.match(r"[\d.]+", text)[0])


def test_the_time_lost_an_hour_is_the_write_time_by_its_rate(tmp_path, said):
    config = make_config(checkpoint_seconds=900.0)
    lost = measure.measure_checkpoint(config, tmp_path, say=said.__setitem__)
    assert (tmp_path / "step_00000001" / "commit.json").is_file()
    assert lost > 0
    assert number(said["training lost an hour, one each 900 s"]) == pytest.approx(lost, abs=0.5)
    assert number(said["write, sync and hash"]) == pytest.approx(lost * 900 / 3600, abs=0.05)


def test_a_host_slower_than_the_step_shows(said, monkeypatch):
    read_ahead = Loop._read_ahead

    def slowly(loop):
        time.sleep(0.2)
        read_ahead(loop)

    monkeypatch.setattr(Loop, "_read_ahead", slowly)
    monkeypatch.setattr(measure, "OVERHEAD_MODEL", SMALL_MODEL)
    assert measure.measure_overhead(5, say=said.__setitem__) > 0.5


def test_the_hosts_share_is_what_the_loop_says(said, monkeypatch):
    monkeypatch.setattr(measure, "OVERHEAD_MODEL", SMALL_MODEL)
    share = measure.measure_overhead(5, say=said.__setitem__)
    busy = number(said["host at work, by the loop"]) / 100
    assert 0 < busy <= 1, "of the loop's time"
    assert share <= busy + 1e-4, "what the device waits for is host's work"
    assert said["device waits for the host, by the loop"] == f"{share:.2%} of its time"
    assert number(said["step in the loop, median"]) > 0
