# SPDX-License-Identifier: Apache-2.0
"""The reader of compiled HLO finds what runs, how often, and over how many bytes of HBM.

Oracle: module texts written for this test in the compiler's form; trips, bytes and padding are
worked out by hand beside each assertion and are exact.
"""

from __future__ import annotations

import pytest
from atomic_kernels.schedule.hlo import HloModule, hbm_bytes

MODULE = """\
HloModule jit_program, is_scheduled=true

%fused_computation (param_0: f32[256,128]) -> f32[256,128] {
  %param_0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  ROOT %mul.1 = f32[256,128]{1,0:T(8,128)} multiply(%param_0, %param_0)
}

%body (carry: (s32[], f32[256,128])) -> (s32[], f32[256,128]) {
  %one = s32[]{:T(128)} constant(2)
  %carry = (s32[]{:T(128)}, f32[256,128]{1,0:T(8,128)}) parameter(0)
  %index = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %next = s32[]{:T(128)} add(%index, %one)
  %x = f32[256,128]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %fusion.1 = f32[256,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"77"}}
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[256,128]{1,0:T(8,128)}) tuple(%next, %fusion.1)
}

%condition (carry.1: (s32[], f32[256,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(11)
  %carry.1 = (s32[]{:T(128)}, f32[256,128]{1,0:T(8,128)}) parameter(0)
  %index.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%index.1, %limit), direction=LT
}

ENTRY %main (a: f32[256,128]) -> f32[256,128] {
  %a = f32[256,128]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(1)
  %copy.1 = s32[]{:T(128)} copy(%zero)
  %kernel.1 = f32[256,128]{1,0:T(8,128)S(1)} custom-call(%a, %a), custom_call_target="tpu_custom_call"
  %copy-start = (f32[256,128]{1,0:T(8,128)}, f32[256,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%kernel.1)
  %copy-done = f32[256,128]{1,0:T(8,128)} copy-done(%copy-start)
  %tuple.2 = (s32[]{:T(128)}, f32[256,128]{1,0:T(8,128)}) tuple(%copy.1, %copy-done)
  %while.1 = (s32[]{:T(128)}, f32[256,128]{1,0:T(8,128)}) while(%tuple.2), condition=%condition, body=%body
  ROOT %out = f32[256,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501
ARRAY_BYTES = 256 * 128 * 4


def work_by_name(text: str):
    return {item.instruction.name: item for item in HloModule(text).work()}


def test_only_scheduled_work_is_listed_in_program_order():
    names = [item.instruction.name for item in HloModule(MODULE).work()]
    assert names == ["copy.1", "kernel.1", "copy-start", "copy-done", "lt", "next", "fusion.1"]


def test_counted_loops_multiply_their_body_and_test():
    work = work_by_name(MODULE)
    assert work["kernel.1"].executions == 1
    assert work["fusion.1"].executions == 5  # 1, 3, 5, 7, 9
    assert work["lt"].executions == 6


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("direction=LT", "direction=NE"),
        ("constant(11)", "parameter(1)"),
        ("add(%index, %one)", "multiply(%index, %one)"),
        ("tuple(%copy.1, %copy-done)", "tuple(%a, %copy-done)"),
        ("constant(2)", "constant(0)"),
    ],
    ids=["test", "limit", "step", "start", "zero_step"],
)
def test_a_loop_that_is_not_counted_has_unknown_executions(before, after):
    assert before in MODULE
    work = work_by_name(MODULE.replace(before, after))
    assert work["fusion.1"].executions is None
    assert work["kernel.1"].executions == 1


CARRIED_STEP = (
    MODULE.replace("(s32[], f32[256,128])", "(s32[], f32[256,128], s32[])")
    .replace("T(8,128)}) parameter(0)", "T(8,128)}, s32[]{:T(128)}) parameter(0)")
    .replace("%one = s32[]{:T(128)} constant(2)\n", "")
    .replace("%next =", "%one = s32[]{:T(128)} get-tuple-element(%carry), index=2\n  %next =")
    .replace("tuple(%next, %fusion.1)", "tuple(%next, %fusion.1, %one)")
    .replace("tuple(%copy.1, %copy-done)", "tuple(%copy.1, %copy-done, %copy.1)")
)


def test_a_step_carried_through_the_loop_unchanged_is_known():
    assert work_by_name(CARRIED_STEP)["fusion.1"].executions == 10  # from 1, by 1, to 11


def test_an_index_copied_to_scalar_memory_is_followed():
    copied = MODULE.replace("add(%index, %one)", "add(%copy.2, %one)").replace(
        "  %next =", "  %copy.2 = s32[]{:T(128)S(6)} copy(%index)\n  %next ="
    )
    assert work_by_name(copied)["fusion.1"].executions == 5


def test_a_carried_step_that_the_loop_changes_is_unknown():
    changing = CARRIED_STEP.replace(
        "tuple(%next, %fusion.1, %one)", "tuple(%next, %fusion.1, %next)"
    )
    assert work_by_name(changing)["fusion.1"].executions is None


def test_a_trip_count_stated_by_the_compiler_is_taken():
    stated = MODULE.replace(
        "body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}\n'
    ).replace("direction=LT", "direction=NE")
    assert work_by_name(stated)["fusion.1"].executions == 9


def test_bytes_count_arrays_in_hbm_once():
    work = work_by_name(MODULE)
    assert work["kernel.1"].hbm_bytes == ARRAY_BYTES  # read twice, counted once; result in VMEM
    assert work["copy-start"].hbm_bytes == ARRAY_BYTES  # from VMEM to HBM
    assert work["copy-done"].hbm_bytes == 0
    assert work["fusion.1"].hbm_bytes == 2 * ARRAY_BYTES


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 8 * 128 * 4),
        ("bf16[16,64]{1,0:T(8,128)(2,1)}", 16 * 128 * 2),  # 64 lanes padded to 128
        ("f32[3,5,130]{2,1,0:T(8,128)}", 3 * 8 * 256 * 4),
        ("f32[130,5]{0,1:T(8,128)}", 8 * 256 * 4),  # transposed layout: 130 is the lane axis
        ("pred[10]{0:T(512)}", 512),
        ("s4[8,128]{1,0}", 512),
        ("f32[]", 4),
        ("(f32[8,128]{1,0}, /*index=1*/bf16[8,128]{1,0})", 8 * 128 * 6),
        ("f32[8,128]{1,0:T(8,128)S(1)}", 0),
        ("s32[1]{0:T(128)S(6)}", 0),
        ("token[]", 0),
    ],
)
def test_padded_bytes_of_a_shape(shape, size):
    assert hbm_bytes(shape) == size


def test_branches_of_a_conditional_have_unknown_executions():
    text = MODULE.replace(
        "while(%tuple.2), condition=%condition, body=%body",
        "conditional(%copy.1, %tuple.2), branch_computations={%condition, %body}",
    )
    work = work_by_name(text)
    assert work["fusion.1"].executions is None
    assert work["lt"].executions is None


def test_opcodes_inside_a_fusion_are_known():
    work = work_by_name(MODULE)
    assert work["fusion.1"].fused == {"multiply"}
    assert work["kernel.1"].fused == frozenset()


def test_an_attribute_printed_over_three_lines_stays_with_its_instruction():
    # jax's splash attention hands its block sizes on; the lines that follow must not end the
    # computation, although one begins with a brace.
    metadata = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 256}"\n}}'
    target = 'custom_call_target="tpu_custom_call"'
    broken = MODULE.replace(target, f'{target}, {metadata}, metadata={{op_name="a/b"}}')
    assert broken.count("\n") == MODULE.count("\n") + 2
    found = work_by_name(broken)
    assert list(found) == list(work_by_name(MODULE))
    assert found["kernel.1"].instruction.attribute(r'op_name="([^"]*)"') == "a/b"


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        HloModule("HloModule nothing\n")
