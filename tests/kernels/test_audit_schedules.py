# SPDX-License-Identifier: Apache-2.0
"""The schedule comparison compares what it says, and keeps lines that failed.

Oracle: shapes and dtypes that the operation's contract states (by `jax.eval_shape`, without a
compile), and rows made from a report of round numbers. One peer is compiled at a small shape, to
see that its kernels, not its interpreter, are what is counted.
"""

from __future__ import annotations

import importlib.util
import inspect
import platform

import jax
import jax.numpy as jnp
import pytest
from atomic_kernels.audit import programs, schedules
from atomic_kernels.audit.figures import comparison_figure
from atomic_kernels.schedule import Operation, ScheduleCompileError, ScheduleReport

needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64")
    or importlib.util.find_spec("libtpu") is None,
    reason="needs the libtpu package, which exists for Linux on x86-64 only",
)
needs_peers = pytest.mark.skipif(
    importlib.util.find_spec("atomic_gdn2") is None,
    reason="needs the peers' package, atomic-ops 0.2.0",
)


def operation(name: str, kind: str, cycles: int | None) -> Operation:
    return Operation(
        name=name, kind=kind, opcode="", source="", executions=1, bundles=10, cycles=cycles,
        cycles_at_least=1_500_000, stall_cycles=None if cycles is None else cycles // 10,
        estimated_cycles=None, vmem_bytes=2**21, hbm_bytes=819_000_000, matmul_cycles=750_000,
    )  # fmt: skip


def report(*operations: Operation) -> ScheduleReport:
    return ScheduleReport(
        target="", arguments={}, topology="v5e:2x4", devices=1, device_kind="TPU v5 lite",
        jax_version="0", libtpu_version="0", compile_seconds=2.0,
        memory={"argument_bytes": 2**20, "output_bytes": 2**20, "temp_bytes": 0},
        operations=operations,
    )  # fmt: skip


LINE = schedules.ComparedProgram(
    implementation="ours", dtype="bfloat16", direction="forward", program="forward",
    arguments={"B": 1, "T": 64, "H": 1, "K": 128},
)  # fmt: skip


def test_row_splits_kernels_from_passes_and_gives_floors():
    whole = report(operation("k", "pallas", 3_000_000), operation("f", "fusion", 1_500_000))
    row = schedules.comparison_row(schedules.ComparedSchedule(compared=LINE, report=whole))
    assert row["kernels_ms"] == pytest.approx(2.0)
    assert row["passes_ms"] == pytest.approx(1.0)
    assert row["static_ms"] == pytest.approx(3.0)
    assert row["with_stalls_ms"] == pytest.approx(3.3)
    assert row["byte_floor_ms"] == pytest.approx(1.0)  # of the kernel alone
    assert row["matmul_floor_ms"] == pytest.approx(0.5)
    assert row["vmem_mib"] == pytest.approx(2.0)
    assert (row["B"], row["T"], row["failure"]) == (1, 64, None)


def test_row_of_an_unknown_count_is_unknown_with_a_lower_bound():
    whole = report(operation("k", "pallas", None), operation("f", "fusion", 1_500_000))
    row = schedules.comparison_row(schedules.ComparedSchedule(compared=LINE, report=whole))
    assert row["static_ms"] is row["kernels_ms"] is row["passes_ms"] is None
    assert row["at_least_ms"] == pytest.approx(2.0)


def test_a_program_that_does_not_compile_is_kept_with_its_reason(monkeypatch):
    def refuse(target, **options):
        raise ScheduleCompileError("the peer package atomic_gdn2 is not installed")

    monkeypatch.setattr(schedules, "compile_schedule", refuse)
    monkeypatch.setattr(schedules, "require_compiler", lambda: None)
    (kept,) = schedules.compare_schedules([LINE])
    row = schedules.comparison_row(kept)
    assert row["failure"] == "the peer package atomic_gdn2 is not installed"
    assert row["implementation"] == "ours"


def test_figure_shows_bars_bounds_and_failures():
    pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    known = report(operation("k", "pallas", 3_000_000))
    unknown = report(operation("k", "pallas", None))
    rows = [
        schedules.comparison_row(
            schedules.ComparedSchedule(compared=LINE, report=item, failure=why)
        )
        for item, why in ((known, None), (unknown, None), (None, "no"))
    ]
    (axes,) = comparison_figure(rows).axes
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["2.00", "1.00", "did not compile"]
    assert len(axes.get_yticklabels()) == 3


@pytest.mark.parametrize("line", schedules.compared_programs(), ids=lambda line: (
    f"{line.implementation}-{line.dtype}-{line.direction}"
))  # fmt: skip
def test_every_compared_line_names_a_program_and_arguments_it_takes(line):
    factory = getattr(programs, line.program)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()):
        factory = {"training": programs.forward}.get(
            line.program, getattr(programs, line.program.replace("training", "forward"))
        )
    inspect.signature(factory).bind(**line.arguments)
    assert line.program.endswith(line.direction)


@pytest.mark.parametrize("projections", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_our_training_program_returns_a_gradient_for_each_argument(dtype, projections):
    function, arguments = programs.training(
        B=1, T=32, H=2, K=16, V=8, value_heads=4, dtype=dtype, projections=projections,
        decay_parameters=projections, backend="xla", chunk_size=16,
    )  # fmt: skip
    gradients = jax.eval_shape(function, *arguments)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in arguments[:-1]]
    assert arguments[-1].shape == (1, 32, 4, 8)


def test_our_forward_program_returns_output_and_state():
    function, arguments = programs.forward(B=1, T=32, H=2, K=16, V=8, backend="xla", chunk_size=16)
    o, state = jax.eval_shape(function, *arguments)
    assert (o.shape, o.dtype) == ((1, 32, 2, 8), jnp.bfloat16)
    assert (state.shape, state.dtype) == ((1, 2, 16, 8), jnp.float32)


def test_decode_step_keeps_the_state_in_place():
    step, arguments = programs.decode_step(B=4, H=2, K=16, V=8)
    o, state = jax.eval_shape(step, *arguments)
    assert (o.shape, o.dtype) == ((4, 2, 8), jnp.bfloat16)
    assert (state.shape, state.dtype) == (arguments[0].shape, arguments[0].dtype)


def test_a_missing_peer_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps atomic-ops==0\.2\.0"):
        programs.atomic_gdn2_forward()


@pytest.mark.compiler
@needs_compiler
@needs_peers
def test_a_peer_is_compiled_as_kernels_for_the_chip():
    line = schedules.ComparedProgram(
        implementation="atomic_gdn2", dtype="float32", direction="forward",
        program="atomic_gdn2_forward", arguments={"B": 1, "T": 128, "H": 1, "K": 128},
    )  # fmt: skip
    (compiled,) = schedules.compare_schedules([line])
    assert compiled.failure is None
    assert len(compiled.report.kernels) == 3  # scores, inverse, scan
    row = schedules.comparison_row(compiled)
    assert row["static_ms"] > 0
    assert row["matmul_floor_ms"] > 0
