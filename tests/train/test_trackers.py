# SPDX-License-Identifier: Apache-2.0
"""Protects a run against those who only watch it, and that TensorBoard gets the numbers of the log.

Packages are stood in for by modules that fail in every place where the real ones can: at import, at
start, at a point, at the end, by never coming back, by ending the program. Oracle of the event
file: TensorBoard's own record format (length, checksum, protobuf), read by its protobuf classes.
"""

import struct
import sys
import threading
import types

import pytest
from tensorboardX.proto.event_pb2 import Event

from atomic_lib.train import trackers
from atomic_lib.train.trackers import QUEUE_ROWS, Trackers

TRAIN = {"kind": "train", "step": 7, "loss": 2.5, "lr": 1e-3, "mfu": None, "run": "ignored"}
EVAL = {"kind": "eval", "step": 7, "ce": 2.25, "bpb_est": 0.75, "bpb_exact": None}


def scalars(folder):
    """(tag, step, value) of every scalar in the event files of a folder."""
    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def opened(names, path, clock=lambda: 0.0):
    return Trackers(names, run=path, config={"run": "tiny"}, clock=clock)


def test_tensorboard_gets_train_and_eval_points(tmp_path):
    tracking = opened(["tensorboard"], tmp_path)
    for row in (TRAIN, EVAL, {"kind": "event", "event": "resume", "step": 3}):
        tracking.log(row)
    tracking.close()
    assert list(tracking.failures()) == []
    assert scalars(tmp_path / "watch" / "tensorboard") == [
        ("train/loss", 7, 2.5),
        ("train/lr", 7, pytest.approx(1e-3, rel=1e-6)),
        ("eval/ce", 7, 2.25),
        ("eval/bpb_est", 7, 0.75),
    ]


def test_at_most_one_training_point_a_second_and_every_evaluation(tmp_path):
    now = [0.0]
    tracking = opened(["tensorboard"], tmp_path, clock=lambda: now[0])
    for step in range(1, 9):
        now[0] = step * 0.5
        tracking.log({**TRAIN, "step": step})
        tracking.log({**EVAL, "step": step})
    tracking.close()
    points = scalars(tmp_path / "watch" / "tensorboard")
    assert [step for tag, step, _ in points if tag == "train/loss"] == [1, 3, 5, 7]
    assert [step for tag, step, _ in points if tag == "eval/ce"] == list(range(1, 9))


class FakeRun:
    """A W&B run that records its calls, or fails at one of them."""

    def __init__(self, fails_at, calls):
        self._fails_at, self._calls = fails_at, calls

    def _call(self, name, *arguments):
        self._calls.append((name, *arguments))
        if self._fails_at == name:
            raise ConnectionError("no network")

    def log(self, values, step):
        self._call("log", values, step)

    def finish(self):
        self._call("finish")


def fake_wandb(fails_at, calls):
    def init(**settings):
        calls.append(("init", settings["id"], settings["mode"]))
        if fails_at == "init":
            raise ConnectionError("no network")
        if fails_at == "exit":
            sys.exit("no key")
        return FakeRun(fails_at, calls)

    return types.SimpleNamespace(init=init)


def test_wandb_gets_the_points_and_asks_for_no_key(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(None, calls))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracking = opened(["wandb"], tmp_path / "train-tiny")
    tracking.log(TRAIN)
    tracking.close()
    assert list(tracking.failures()) == []
    point = ("log", {"train/loss": 2.5, "train/lr": 1e-3}, 7)
    assert calls == [("init", "train-tiny", "offline"), point, ("finish",)]


@pytest.mark.parametrize(
    ("fails_at", "reason"),
    [
        ("import", "ModuleNotFoundError"),
        ("init", "ConnectionError: no network"),
        ("exit", "SystemExit: no key"),
        ("log", "ConnectionError: no network"),
        ("finish", "ConnectionError: no network"),
    ],
)
def test_a_failing_package_is_told_once_and_hurts_nobody(tmp_path, monkeypatch, fails_at, reason):
    package = None if fails_at == "import" else fake_wandb(fails_at, [])
    monkeypatch.setitem(sys.modules, "wandb", package)  # None: the import fails
    tracking = opened(["wandb", "tensorboard"], tmp_path)
    for step in range(3):
        tracking.log({**EVAL, "step": step})
    tracking.close()
    told = list(tracking.failures())
    assert [name for name, _ in told] == ["wandb"]
    assert reason in told[0][1]
    assert list(tracking.failures()) == [], "a failure is told once"
    steps = [step for tag, step, _ in scalars(tmp_path / "watch" / "tensorboard") if "ce" in tag]
    assert steps == [0, 1, 2], "the other tracker goes on"


def test_a_package_that_never_comes_back_delays_nothing(tmp_path, monkeypatch):
    release = threading.Event()
    package = types.SimpleNamespace(init=lambda **settings: release.wait(30))
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    waiting, full = opened(["trackio"], tmp_path), opened(["trackio"], tmp_path)
    waiting.log(EVAL)
    for step in range(QUEUE_ROWS + 1):
        full.log({**EVAL, "step": step})
    assert list(full.failures()) == [("trackio", "600 points wait: it does not keep up")]
    waiting.close()
    full.close()
    release.set()
    ((_, reason),) = waiting.failures()
    assert reason.startswith("did not end within")
