# SPDX-License-Identifier: Apache-2.0
"""A schedule report says unknown where it does not know, and comes back whole from JSON.

Oracle: reports built here from round numbers, so that every time and ratio is known by hand.
Also protected: errors that say what to do where no TPU compiler can run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from atomic_kernels.schedule import ScheduleReport, ScheduleUnavailableError, require_compiler
from atomic_kernels.schedule.__main__ import main, parse_arguments
from atomic_kernels.schedule.bundles import Loop
from atomic_kernels.schedule.chips import CHIPS, chip_for_topology
from atomic_kernels.schedule.compiler import compile_schedule, worker_environment
from atomic_kernels.schedule.report import Operation, UnitProfile, UnitUse
from atomic_kernels.schedule.table import operation_row, report_table
from atomic_kernels.schedule.worker import load_factory


def kernel(**changes) -> Operation:
    """1.5 million cycles: 1 ms on a v5e."""
    base = Operation(
        name="kernel.1", kind="pallas", opcode="custom-call", source="jit(f)/kernel",
        executions=2, bundles=1000, cycles=1_500_000, cycles_at_least=1_500_000,
        stall_cycles=300_000, estimated_cycles=None, vmem_bytes=2**20, hbm_bytes=409_500_000,
        matmul_cycles=600_000,
        loops=(Loop(start=0, stop=900, depth=1, region=3, trips=1500, fill=2),),
        units=(UnitUse(unit="MXU", capacity=4, busy_slots=10, slots=40),),
        main_loop_units=(
            UnitUse(unit="VLOAD:FILL", capacity=3, busy_slots=500, slots=3000),
            UnitUse(unit="VSTORE:SPILL", capacity=1, busy_slots=750, slots=1000),
        ),
        profile=UnitProfile(
            units=("MXU", "VSTORE"), bundles=4, fractions=((0.5, 1.0), (0.0, 0.25))
        ),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def scalar() -> Operation:
    return kernel(
        name="add.1", kind="other", opcode="add", bundles=None, cycles=None, cycles_at_least=None,
        stall_cycles=None, matmul_cycles=None, hbm_bytes=4, loops=(), units=(),
        main_loop_units=(), profile=None, executions=None,
    )  # fmt: skip


def report(*operations: Operation) -> ScheduleReport:
    return ScheduleReport(
        target="module:case", arguments={"T": 4096}, topology="v5e:2x4", devices=1,
        device_kind="TPU v5 lite", jax_version="0.10.2", libtpu_version="0.0.42",
        compile_seconds=1.0, memory={"argument_bytes": 2**20, "temp_bytes": 0},
        operations=operations,
    )  # fmt: skip


def test_times_floors_and_ratios_of_a_kernel():
    whole = report(kernel(), scalar())
    row = operation_row(whole, whole.kernels[0])
    assert row["static_ms"] == pytest.approx(1.0)
    assert row["static_with_stalls_ms"] == pytest.approx(1.2)
    assert row["byte_floor_ms"] == pytest.approx(0.5)  # 409.5 MB at 819 GB/s
    assert row["matmul_floor_ms"] == pytest.approx(0.4)
    assert row["floor_ratio"] == pytest.approx(2.0)
    assert row["bound_ms"] == pytest.approx(1.2)
    assert row["spills_and_fills_per_bundle"] == pytest.approx(1.25)
    assert whole.cycles == 3_000_000  # two runs; the scalar of unknown count has no schedule
    assert whole.kernel_cycles == 3_000_000
    assert whole.cycles_with_stalls == 3_600_000
    assert whole.matmul_cycles == 1_200_000


def test_passes_outside_kernels_are_those_that_move_much():
    moved = kernel(name="copy.1", kind="copy", hbm_bytes=2**20)
    ahead = kernel(name="copy-start.1", kind="transfer", hbm_bytes=2**30)
    whole = report(kernel(), scalar(), moved, ahead)
    assert [item.name for item in whole.passes_outside_kernels()] == ["copy.1"]
    assert whole.passes_outside_kernels(2**21) == ()


@pytest.mark.parametrize("field", ["cycles", "executions"])
def test_an_unknown_count_is_never_taken_as_one(field):
    unknown = {"cycles": None, "stall_cycles": None} if field == "cycles" else {"executions": None}
    whole = report(kernel(), kernel(name="kernel.2", **unknown))
    assert whole.cycles is None
    assert whole.kernel_cycles is None
    assert whole.cycles_at_least == 3_000_000 + (2 if field == "cycles" else 1) * 1_500_000
    text = report_table(whole)
    assert "static time unknown" in text
    assert "at least" in text
    assert "unknown" in next(line for line in text.splitlines() if line.startswith("kernel.2"))


def test_a_collective_without_a_schedule_makes_the_total_unknown():
    gather = dataclasses.replace(scalar(), name="all-gather.1", kind="collective", executions=1)
    whole = report(kernel(), gather)
    assert whole.cycles is None
    assert whole.cycles_with_stalls is None
    assert whole.kernel_cycles == 3_000_000


def test_json_returns_an_equal_report(tmp_path):
    whole = report(kernel(), scalar())
    whole.save(tmp_path / "report.json")
    assert ScheduleReport.from_json((tmp_path / "report.json").read_text()) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_unit_by_name_refuses_a_unit_that_is_not_there():
    assert kernel().unit("MXU").fraction == 0.25
    with pytest.raises(ValueError, match="'MXU9' is none of"):
        kernel().unit("MXU9")


def test_figure_has_a_panel_a_kernel_and_refuses_unknown_names():
    pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    from atomic_kernels.schedule.figure import unit_figure

    figure = unit_figure(report(kernel(), kernel(name="kernel.2")))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [panel.get_title().split()[0] for panel in panels] == ["kernel.1", "kernel.2"]
    assert panels[0].images[0].get_array().tolist() == [[0.5, 1.0], [0.0, 0.25]]
    with pytest.raises(ValueError, match=r"kernel\.9"):
        unit_figure(report(kernel()), "kernel.9")


def test_figure_without_matplotlib_says_how_to_install_it(monkeypatch):
    import atomic_kernels.schedule.figure as figure

    monkeypatch.setattr(figure.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        figure.unit_figure(report(kernel()))


@pytest.mark.parametrize("topology", ["v5p:2x2", "v5e", "v5e:", "", "cpu:1"])
def test_unknown_topologies_are_refused_before_any_compile(topology):
    with pytest.raises(ValueError, match=r'topology: .* "v5e:2x4"'):
        chip_for_topology(topology)


def test_missing_libtpu_says_what_to_install(monkeypatch):
    import atomic_kernels.schedule.compiler as compiler

    monkeypatch.setattr(compiler.platform, "system", lambda: "Linux")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ScheduleUnavailableError, match=r"pip install 'jax\[tpu\]=="):
        require_compiler()


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_another_platform_is_named(monkeypatch, system, machine):
    import atomic_kernels.schedule.compiler as compiler

    monkeypatch.setattr(compiler.platform, "system", lambda: system)
    monkeypatch.setattr(compiler.platform, "machine", lambda: machine)
    with pytest.raises(ScheduleUnavailableError, match=f"{system} on {machine}"):
        require_compiler()


def test_worker_environment_keeps_the_callers_compiler_options(tmp_path):
    base = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=32768", "HOME": "/home/someone"}
    environment = worker_environment(base, CHIPS["v6e"], tmp_path)
    assert environment["LIBTPU_INIT_ARGS"].startswith("--xla_tpu_scoped_vmem_limit_kib=32768 ")
    assert f"--xla_jf_dump_to={tmp_path}" in environment["LIBTPU_INIT_ARGS"]
    assert environment["TPU_ACCELERATOR_TYPE"] == "v6e-8"
    assert environment["HOME"] == "/home/someone"


def test_a_dump_directory_with_old_texts_is_refused(tmp_path, monkeypatch):
    import atomic_kernels.schedule.compiler as compiler

    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    (tmp_path / "old.txt").write_text("")
    with pytest.raises(ValueError, match=r"dump_directory: .* is not empty"):
        compile_schedule("module:case", dump_directory=tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("module", "is not MODULE:FUNCTION"),
        (":case", "is not MODULE:FUNCTION"),
        ("json:absent", "json has no attribute 'absent'"),
        ("absent_file.py:case", "no Python file at"),
    ],
)
def test_targets_that_name_nothing_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        load_factory(target)


def test_targets_are_found_by_module_and_by_file(tmp_path):
    assert load_factory("json:dumps") is json.dumps
    (tmp_path / "cases.py").write_text("def case():\n    return 7\n")
    assert load_factory(f"{tmp_path}/cases.py:case")() == 7


def test_the_worker_ends_when_its_parent_is_gone():
    child = (
        "import os, sys, time; from atomic_kernels.schedule.worker import end_with_parent;"
        "end_with_parent(os.getppid(), every_seconds=0.05); print(os.getpid(), flush=True);"
        "time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        "stdout=subprocess.PIPE, text=True); print(child.stdout.readline().strip())"
    )
    finished = subprocess.run(
        [sys.executable, "-c", parent, child],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    process = int(finished.stdout)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()


def test_command_line_arguments_are_json_or_words():
    words = ["T=4096", "dtype=bf16", "heads=[1, 2]", "flag=true", "text=a=b"]
    assert parse_arguments(words) == {
        "T": 4096, "dtype": "bf16", "heads": [1, 2], "flag": True, "text": "a=b",
    }  # fmt: skip
    with pytest.raises(ValueError, match="'T' is not name=value"):
        parse_arguments(["T"])


def test_command_line_prints_errors_not_tracebacks(capsys):
    assert main(["json:dumps", "--topology", "v9x:1"]) == 1
    assert capsys.readouterr().err.startswith("error: topology: 'v9x:1'")
