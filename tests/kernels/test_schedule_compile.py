# SPDX-License-Identifier: Apache-2.0
"""Compiling for a TPU topology gives the counts that the kernels' own shapes demand.

Oracle: the programs of schedule_cases.py, whose grid steps, loop bounds, matrix products and
bytes are known from their text; nothing here depends on how the compiler schedules, so the same
numbers hold for every libtpu. Needs libtpu (no TPU) and is skipped only without it.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import pytest
from atomic_kernels.schedule import ScheduleCompileError, ScheduleReport, compile_schedule

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64")
    or importlib.util.find_spec("libtpu") is None,
    reason="needs the libtpu package, which exists for Linux on x86-64 only",
)

CASES = Path(__file__).parent / "schedule_cases.py"


def compiled(case: str, **options) -> ScheduleReport:
    return compile_schedule(f"{CASES}:{case}", **options)


# Cycles of one [128, 128] @ [128, 128]: 2 * 128**3 FLOP at 131,072 a cycle on a v5e; a v6e does
# 524,288, but 128 columns fill only half of its 256.
PRODUCT_CYCLES = {"v5e:2x4": 32, "v6e:2x4": 16}


@pytest.mark.parametrize("topology", list(PRODUCT_CYCLES))
def test_a_grid_of_products_has_its_trips_bytes_and_matrix_cycles(topology):
    report = compiled("matmul_grid", arguments={"steps": 20}, topology=topology)
    (kernel,) = report.kernels
    assert kernel.name.startswith("matmul_grid")
    assert kernel.executions == 1
    assert [(loop.trips, loop.fill) for loop in kernel.loops] == [(22, 2)]
    loop = kernel.loops[0]
    assert kernel.cycles == kernel.bundles + (loop.stop - loop.start) * 21
    assert kernel.matmul_cycles == 20 * PRODUCT_CYCLES[topology]
    assert kernel.hbm_bytes <= (2560 * 128 + 128 * 128) * 2 + 2560 * 128 * 4
    assert kernel.hbm_bytes >= 128 * 128 * 2
    # Two buffers of each of the three windows that are pipelined through VMEM, at most.
    assert 0 < kernel.vmem_bytes <= 2 * 128 * 128 * (2 + 2 + 4) + 4096
    assert kernel.stall_cycles > 0  # a product's result takes longer than its issue
    assert report.kernel_cycles == kernel.cycles
    assert kernel.profile.bundles > loop.stop - loop.start
    assert max(kernel.profile.fractions[kernel.profile.units.index("MXU")]) > 0.5


def test_nested_loops_multiply_and_an_unknown_count_stays_unknown():
    report = compiled("nested_loops")
    (kernel,) = report.kernels
    assert [loop.trips for loop in kernel.loops] == [8, 16, 7, 5, None]
    assert [loop.depth for loop in kernel.loops] == [1, 2, 2, 3, 3]
    assert kernel.cycles is None
    assert report.cycles is None
    assert report.kernel_cycles is None
    assert kernel.cycles_at_least > 8 * (16 + 7 * 5)


def test_a_kernel_in_a_scan_counts_once_a_trip_and_the_transpose_is_seen():
    report = compiled("scanned_kernel", arguments={"trips": 11})
    (kernel,) = report.kernels
    assert kernel.executions == 11
    assert report.kernel_cycles == 11 * kernel.cycles
    moved = [item for item in report.others if item.hbm_bytes >= 2048 * 128 * 2]
    assert any(item.kind in ("copy", "fusion") for item in moved)
    assert report.memory["argument_bytes"] == (2048 * 128 + 128 * 128) * 2


def test_equal_kernels_compiled_once_all_count():
    report = compiled("repeated_kernel", arguments={"times": 3})
    assert len(report.kernels) == 3
    assert len({kernel.cycles for kernel in report.kernels}) == 1
    assert report.kernel_cycles == 3 * report.kernels[0].cycles


def test_a_kernel_in_a_while_loop_has_unknown_executions():
    report = compiled("while_kernel")
    (kernel,) = report.kernels
    assert kernel.executions is None
    assert kernel.cycles is not None
    assert report.cycles is None


def test_a_kernel_too_large_for_vmem_says_what_to_change():
    with pytest.raises(ScheduleCompileError, match="smaller blocks or fewer heads"):
        compiled("too_much_vmem")


def test_a_fault_in_the_function_is_passed_on():
    with pytest.raises(ScheduleCompileError, match="fault in the traced function"):
        compiled("broken")


def test_kept_dump_holds_the_kernels_texts(tmp_path):
    compiled("matmul_grid", dump_directory=tmp_path / "dump")
    assert list((tmp_path / "dump").glob("*-matmul_grid*-final_bundles.txt"))
