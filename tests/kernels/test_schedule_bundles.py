# SPDX-License-Identifier: Apache-2.0
"""The reader of TPU schedules counts what the compiler's texts say, no more.

Oracles: a schedule written for this test, whose loops are counted by eye; and two saved dumps of
small kernels (schedule_cases.py, libtpu 0.0.42, v5e) whose counts follow from the kernels' own
grid and loop bounds and from the bundle addresses in the text. Everything is an exact integer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from atomic_kernels.schedule.bundles import (
    ScheduleFormatError,
    bundle_weights,
    find_loops,
    parse_bundles,
    parse_loop_regions,
    parse_units,
)
from atomic_kernels.schedule.chips import CHIPS
from atomic_kernels.schedule.dump import Dump
from atomic_kernels.schedule.operations import (
    unit_profile,
    unit_use,
    with_schedule,
)
from atomic_kernels.schedule.report import Operation

DUMPS = Path(__file__).parent / "schedule_dumps"

# One pipelined loop of 6 trips (bundles 1 to 0x12) around a loop of 3 (2 to 7) and one whose
# count is not known (8 to 0xd); each closing branch is followed by its four delay slots.
BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s0 = smov 0 }
   0x1 LB: > { %s1 = sphi %s0, %s9 /* phi copy :: iteration index, stage = 0 */ }
   0x2 LB: >> { %1 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %2 = vmatmul.msk.bf16.gmra.mxu1 %v2 }
   0x3   : >> { %p1 = scmp.ge.s32.totalorder %s2, 3 /* loop exit test */ ;; %3 = sbr.rel (!%p1) target = $region20 }
   0x4   :  {}
   0x5   : >> { %v4 = vadd.f32 %v3, %v3 }
   0x6   :  {}
   0x7   :  {}
   0x8 LB: >> { %4 = dma.hbm_to_vmem [thread:$0] /*steps_per_stride
base_bounds: (6, 1)
 */ }
   0x9   : >> { %5 = sbr.rel (!%p2) target = $region30 }
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   : > { %6 = sbr.rel (%p4) target = $region40  ;;  %7 = sbr.rel (!%p3) target = $region10 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {} /* End region 10 */
  0x13   :  { %8 = vmatmul.f32.gmra.mxu0 %v1 } /* exit bundle */
"""  # noqa: E501
LISTING = """\
$region0: #{kernel}
  %s0 = smov 0
    loop: start=0, step=1, limit=6
    $region9: #{kernel} parent=1 // loop_pre_header
    $region10: #{kernel} parent=1 // loop_body
        loop: start=1, step=2, limit=6
        $region20: #{kernel} parent=10 // loop_body
        // DoWhile loop
        $region29: #{kernel} parent=10 // loop_pre_header
        $region30: #{kernel} parent=10 // loop_body
      $region40: #{kernel} parent=10
"""
UNITS_HEADER = "== CAPACTIY:\nMXU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL\n4 3 3 1 1\n"


def unit_text(rows: dict[int, str], count: int = 0x14) -> str:
    lines = [rows.get(index, "0 0 0 0 0") for index in range(count)]
    return UNITS_HEADER + "== UTILIZATION:\n" + "\n".join(lines) + "\n"


def bare_operation(name: str) -> Operation:
    return Operation(
        name=name, kind="pallas", opcode="custom-call", source="", executions=1, bundles=None,
        cycles=None, cycles_at_least=None, stall_cycles=None, estimated_cycles=None,
        vmem_bytes=None, hbm_bytes=0, matmul_cycles=None,
    )  # fmt: skip


def test_loops_carry_their_extent_depth_trips_and_fill():
    bundles = parse_bundles(BUNDLES)
    loops = find_loops(bundles, parse_loop_regions(LISTING))
    assert len(bundles) == 0x14
    assert [(loop.start, loop.stop, loop.depth, loop.trips, loop.fill) for loop in loops] == [
        (0x1, 0x13, 1, 6, 2),
        (0x2, 0x8, 2, 3, 0),  # start=1, step=2, limit=6: 1, 3, 5
        (0x8, 0xE, 2, None, 0),
    ]


def test_weights_multiply_trips_and_keep_unknown_counts_unknown():
    bundles = parse_bundles(BUNDLES)
    loops = find_loops(bundles, parse_loop_regions(LISTING))
    weights = bundle_weights(len(bundles), loops)
    assert weights == [1, 6, *[18] * 6, *[None] * 6, *[6] * 5, 1]
    at_least = bundle_weights(len(bundles), loops, unknown_as=1)
    assert at_least == [1, 6, *[18] * 6, *[6] * 6, *[6] * 5, 1]
    body = bundle_weights(len(bundles), loops, unknown_as=1, without_fill=True)
    assert body == [1, 4, *[12] * 6, *[4] * 6, *[4] * 5, 1]


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        ("loop: start=0, step=1, limit=22", 22),
        ("loop: start=3, step=1, limit=19", 16),
        ("loop: start=0, step=4, limit=10", 3),
        ("loop: start=5, step=1, limit=5", 0),
        ("loop: start=0, step=1, limit=%s12", None),
        ("loop: start=0, step=-1, limit=-5", None),
        ("// DoWhile loop", None),
    ],
)
def test_trip_count_of_a_loop_line(loop, trips):
    assert parse_loop_regions(f"  {loop}\n  $region7: #{{k}} parent=1 // loop_body\n") == {7: trips}


def test_branch_targets_of_packed_bundles_are_read_too():
    packed = BUNDLES.replace("target = $region20", "target bundleno = 2 (0x2), region = 20")
    regions = parse_loop_regions(LISTING)
    assert find_loops(parse_bundles(packed), regions) == find_loops(parse_bundles(BUNDLES), regions)


def test_a_lost_bundle_line_is_an_error_not_a_shorter_kernel():
    with pytest.raises(ScheduleFormatError, match="0x6 where 0x5 was expected"):
        parse_bundles(BUNDLES.replace("   0x5   : >>", "   0x5 ?? >>"))


def test_a_loop_without_its_branch_is_an_error():
    with pytest.raises(ScheduleFormatError, match=r"1 loop\(s\), .* lack a branch back"):
        find_loops(
            parse_bundles(BUNDLES.replace("$region30", "$region31")), parse_loop_regions(LISTING)
        )


def test_text_without_bundles_is_an_error():
    with pytest.raises(ScheduleFormatError, match="no bundle line"):
        parse_bundles("= control target key start\n")


@pytest.mark.parametrize("fault", ["CAPACTIY", "UTILIZATION", "row"])
def test_unit_table_of_another_shape_is_an_error(fault):
    text = unit_text({3: "1 2 3"} if fault == "row" else {})
    text = text.replace(f"== {fault}:", "??")
    with pytest.raises(ScheduleFormatError, match="unit table"):
        parse_units(text)


def test_unit_use_is_weighted_by_trips():
    bundles = parse_bundles(BUNDLES)
    loops = find_loops(bundles, parse_loop_regions(LISTING))
    weights = bundle_weights(len(bundles), loops, unknown_as=1)
    # A spill in bundle 1 (6 times) and two fills in bundle 2 (18 times).
    table = parse_units(unit_text({1: "0 0 0 1 1", 2: "4 2 2 0 0"}))
    use = {item.unit: item for item in unit_use(table, weights, 1, 0x13)}
    cycles = 6 * (1 + 6 * 3 + 6 + 5)
    assert use["VSTORE:SPILL"].busy_slots == 6
    assert use["VSTORE:SPILL"].slots == cycles
    assert use["VLOAD:FILL"].busy_slots == 36
    assert use["VLOAD:FILL"].slots == 3 * cycles
    assert use["MXU"].fraction == pytest.approx(4 * 18 / (4 * cycles))


def test_profile_slices_one_trip_of_the_main_loop():
    loops = find_loops(parse_bundles(BUNDLES), parse_loop_regions(LISTING))
    table = parse_units(unit_text({0: "4 0 0 0 0", 1: "4 0 0 0 0", 0x12: "0 3 0 0 0"}))
    profile = unit_profile(table, loops)
    assert profile.bundles == 0x12  # bundle 0 is outside the loop
    assert profile.fractions[0] == (1.0, *[0.0] * 0x11)
    assert profile.fractions[1] == (*[0.0] * 0x11, 1.0)


def test_saved_matmul_kernel_counts_are_those_of_its_grid():
    texts = Dump(DUMPS).texts("matmul_grid.1")
    assert texts is not None
    operation = with_schedule(bare_operation("matmul_grid.1"), texts, CHIPS["v5e"])
    # 20 grid steps; 111 bundles, of which 6 to 105 are the loop.
    assert [(loop.trips, loop.fill) for loop in operation.loops] == [(22, 2)]
    assert operation.bundles == 111
    assert operation.cycles == operation.cycles_at_least == 11 + 22 * 100
    # [128, 128] @ [128, 128]: 128 rows, one a cycle, over 4 units, in each of the 20 steps.
    assert operation.matmul_cycles == 20 * 128 // 4
    assert operation.spills_and_fills_per_bundle == 0.0
    assert operation.stall_cycles == 22 * (len(parse_bundles(texts.packed)) - 111)
    assert operation.unit("MXU").capacity == 4


def test_saved_nested_loops_keep_the_unknown_count_unknown():
    texts = Dump(DUMPS).texts("nested_loops.1")
    assert texts is not None
    operation = with_schedule(bare_operation("nested_loops.1"), texts, CHIPS["v5e"])
    assert [loop.trips for loop in operation.loops] == [8, 16, 7, 5, None]
    assert operation.unknown_loops == 1
    assert operation.cycles is None
    assert operation.stall_cycles is None
    # By addresses: 91 bundles in the grid's loop, of them 8 in the loop of 16 and 30 in that of
    # 7, which holds 8 in the loop of 5 and 7 in the unknown one.
    inner = 30 - 8 - 7 + 8 * 5 + 7
    assert operation.cycles_at_least == 11 + 8 * (91 - 8 - 30 + 8 * 16 + 7 * inner)


def test_matmul_cycles_are_unknown_for_an_operand_format_never_measured():
    texts = Dump(DUMPS).texts("matmul_grid.1")
    assert texts is not None
    other = dataclasses.replace(texts, final=texts.final.replace("vmatmul.bf16", "vmatmul.s8"))
    operation = with_schedule(bare_operation("matmul_grid.1"), other, CHIPS["v5e"])
    assert operation.matmul_cycles is None


def test_bundles_and_unit_rows_that_disagree_are_an_error():
    texts = Dump(DUMPS).texts("matmul_grid.1")
    nested = Dump(DUMPS).texts("nested_loops.1")
    assert texts is not None
    assert nested is not None
    mixed = dataclasses.replace(texts, final_units=nested.final_units)
    with pytest.raises(ScheduleFormatError, match="102 rows of unit use for 111 bundles"):
        with_schedule(bare_operation("matmul_grid.1"), mixed, CHIPS["v5e"])


def test_texts_of_another_instruction_are_not_taken(tmp_path):
    for path in DUMPS.glob("*matmul_grid.1*"):
        (tmp_path / path.name.replace("matmul_grid.1", "matmul_grid.12")).write_text("")
    assert Dump(tmp_path).texts("matmul_grid.1") is None


def test_an_incomplete_dump_is_an_error(tmp_path):
    for path in DUMPS.glob("*matmul_grid.1*"):
        if "final_bundles" not in path.name:
            (tmp_path / path.name).write_text(path.read_text())
    with pytest.raises(ScheduleFormatError, match=r"no final_bundles for matmul_grid\.1"):
        Dump(tmp_path).texts("matmul_grid.1")
