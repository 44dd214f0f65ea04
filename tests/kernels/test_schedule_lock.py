# SPDX-License-Identifier: Apache-2.0
"""The shipped kernels' schedules stay within 3 % of kernels/schedule.lock.json.

The gate compiles every locked case for its topology with the libtpu installed here and compares
cycles and VMEM with the record of the same libtpu release. Its judgement is tested apart, on
records written here, so that it is seen to fail without slowing a kernel. After a change that is
meant: `python -m atomic_kernels.schedule.lock update`, and commit the file.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import platform
import re

import pytest
from atomic_kernels.schedule import lock

ENTRY = {
    "kernels": {"gdn2_forward.1": {"cycles": 1000, "with_stalls": 1100, "vmem_bytes": 4096}},
    "kernel_cycles": 1000,
    "other_cycles": 100,
}


def changed(path: tuple[str, ...], value) -> dict:
    entry = copy.deepcopy(ENTRY)
    place = entry
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return entry


def test_an_equal_or_faster_kernel_passes():
    assert lock.regressions("case", ENTRY, ENTRY) == []
    assert lock.regressions("case", ENTRY, changed(("kernel_cycles",), 500)) == []
    assert lock.regressions("case", ENTRY, changed(("kernel_cycles",), 1030)) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kernel_cycles",), 1031, r"kernel_cycles grew from 1000 to 1031 \(\+3\.1 %\)"),
        (("other_cycles",), 104, r"other_cycles grew from 100 to 104"),
        (("kernels", "gdn2_forward.1", "cycles"), 1100, r"cycles of gdn2_forward\.1 grew"),
        (("kernels", "gdn2_forward.1", "vmem_bytes"), 5000, r"vmem_bytes of gdn2_forward\.1"),
        (("kernel_cycles",), None, r"were 1000 and are now unknown"),
        (("kernels", "copy_kernel.1"), {"cycles": 1, "vmem_bytes": 1}, r"copy_kernel\.1 is not"),
    ],
)
def test_growth_over_the_limit_fails_and_says_how_to_update(path, value, message):
    (problem,) = lock.regressions("case", ENTRY, changed(path, value))
    assert problem.startswith("case: ")
    assert re.search(message, problem)
    assert "lock update" in problem


def test_a_case_never_recorded_fails():
    (problem,) = lock.regressions("case", None, ENTRY)
    assert "not in the record for this libtpu" in problem


def test_work_that_appears_beside_the_kernel_fails():
    (problem,) = lock.regressions("case", changed(("other_cycles",), 0), ENTRY)
    assert "other_cycles grew from 0 to 100 (+inf %)" in problem


def test_update_writes_the_record_that_check_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "measure", lambda name: ("0.0.42.1", ENTRY))
    path = tmp_path / "schedule.lock.json"
    lock.update_lock(["bf16_forward"], path)
    assert json.loads(path.read_text()) == {"0.0.42": {"bf16_forward": ENTRY}}
    assert lock.check_lock(["bf16_forward"], path) == []
    slower = changed(("kernel_cycles",), 2000)
    monkeypatch.setattr(lock, "measure", lambda name: ("0.0.42.1", slower))
    (problem,) = lock.check_lock(["bf16_forward"], path)
    assert "grew from 1000 to 2000" in problem


def test_unknown_cases_are_refused_by_name():
    with pytest.raises(ValueError, match="case: 'bf17_forward' is none of"):
        lock.measure("bf17_forward")


@pytest.mark.compiler
@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64")
    or importlib.util.find_spec("libtpu") is None,
    reason="needs the libtpu package, which exists for Linux on x86-64 only",
)
@pytest.mark.parametrize("name", list(lock.LOCKED_CASES))
def test_shipped_kernels_are_within_the_record(name):
    assert lock.check_lock([name]) == []
