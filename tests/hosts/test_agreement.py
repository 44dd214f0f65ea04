# SPDX-License-Identifier: Apache-2.0
"""Protects that all processes of a run take the same way: after a failure, a clock, a signal.

Two processes are played one after the other: what the other one would send is written by hand.
`test_two_processes.py` runs real ones.
"""

import jax
import numpy as np
import pytest

from atomic_lib.hosts import processes
from atomic_lib.hosts.processes import OtherProcessError, gather, together
from atomic_lib.train import decision
from atomic_lib.train.decision import Decision, require_same_start

OK, FULL_DISK, FAULT = 0.0, 1.0, 2.0


@pytest.fixture
def play(monkeypatch):
    """Makes this the first or second of two processes; the other one sends `theirs`."""

    def begin(*, first: bool, theirs: list[float]):
        def both(values):
            rows = [list(values), theirs] if first else [theirs, list(values)]
            return np.array(rows, np.float64)

        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 0 if first else 1)
        monkeypatch.setattr(processes, "gather", both)
        monkeypatch.setattr(decision, "gather", both)

    return begin


def test_one_process_agrees_with_itself():
    rows = gather([1 / 3, -1.0])
    assert rows.dtype == np.float64
    assert rows.tolist() == [[1 / 3, -1.0]]
    assert together(lambda: "done", "try", first_only=True) == "done"
    now = Decision(elapsed_seconds=1 / 3, evaluated=True, out_of_time=False, save=True, signal=None)
    assert now.shared() == now


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("theirs", "kind"), [(FULL_DISK, OSError), (FAULT, OtherProcessError)])
def test_a_failure_elsewhere_is_raised_here(play, first, theirs, kind):
    play(first=first, theirs=[theirs])
    with pytest.raises(kind, match=f"process {int(first)} could not save"):
        together(lambda: None, "save")


def test_a_failure_here_is_raised_as_it_is(play):
    play(first=True, theirs=[OK])
    with pytest.raises(KeyError, match="mine"):
        together(lambda: {}["mine"], "save")


def test_what_is_for_the_first_process_runs_in_no_other(play):
    done = []
    play(first=False, theirs=[OK])
    assert together(lambda: done.append("ran"), "write", first_only=True) is None
    assert done == []


def test_the_first_process_decides_and_any_signal_counts(play):
    mine = Decision(
        elapsed_seconds=7.0, evaluated=False, out_of_time=True, save=True, signal="SIGTERM"
    )
    theirs = [3.25, 1.0, 0.0, 0.0, 0.0]
    play(first=False, theirs=theirs)
    assert mine.shared() == Decision(
        elapsed_seconds=3.25, evaluated=True, out_of_time=False, save=False, signal="SIGTERM"
    )
    play(first=True, theirs=theirs)
    assert mine.shared() == mine


def test_processes_that_see_other_checkpoints_are_refused(play):
    play(first=True, theirs=[40.0])
    with pytest.raises(RuntimeError, match=r"different checkpoints \(none, step 40"):
        require_same_start(None)
    play(first=True, theirs=[-1.0])
    require_same_start(None)
