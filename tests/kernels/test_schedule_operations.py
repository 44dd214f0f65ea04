# SPDX-License-Identifier: Apache-2.0
"""Operations are sorted into kernels, copies, collectives and passes by what they hold.

Oracle: instructions written here, each of one kind by construction.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from atomic_kernels.schedule.bundles import ScheduleFormatError
from atomic_kernels.schedule.chips import CHIPS
from atomic_kernels.schedule.dump import Dump
from atomic_kernels.schedule.hlo import Instruction, Work
from atomic_kernels.schedule.operations import operation_from_dump

KERNEL = 'custom_call_target="tpu_custom_call"'


def work(opcode: str, *, attributes: str = "", fused: tuple[str, ...] = ()) -> Work:
    instruction = Instruction(
        name=f"{opcode}.1", shape="f32[]", opcode=opcode, operands=(), attributes=attributes,
        is_root=False,
    )  # fmt: skip
    return Work(instruction=instruction, executions=1, hbm_bytes=4, fused=frozenset(fused))


@pytest.mark.parametrize(
    ("opcode", "attributes", "fused", "kind"),
    [
        ("custom-call", 'custom_call_target="AllocateBuffer"', (), "other"),
        ("copy", "", (), "copy"),
        ("transpose", "", (), "copy"),
        ("fusion", "", ("transpose", "reshape"), "copy"),
        ("fusion", "", ("transpose", "add"), "fusion"),
        ("fusion", "", ("add", "all-reduce"), "collective"),
        ("all-gather", "", (), "collective"),
        ("all-gather-start", "", (), "collective"),
        ("copy-start", "", (), "transfer"),
        ("slice-done", "", (), "transfer"),
        ("add", "", (), "other"),
        ("fusion", "", ("multiply",), "fusion"),
    ],
)
def test_kind_of_an_instruction(tmp_path: Path, opcode, attributes, fused, kind):
    item = work(opcode, attributes=attributes, fused=fused)
    operation = operation_from_dump(item, Dump(tmp_path), CHIPS["v5e"])
    assert operation.kind == kind
    assert operation.bundles is None
    assert operation.cycles is None


def test_estimate_vmem_and_source_are_read_from_the_attributes(tmp_path: Path):
    attributes = (
        ', metadata={op_name="jit(f)/mul" stack_frame_id=2}, backend_config={"window_config":'
        '{"estimated_cycles":"7466"},"used_scoped_memory_configs":[{"memory_space":"1",'
        '"offset":"0","size":"4096"}]}'
    )
    item = work("fusion", attributes=attributes, fused=("multiply",))
    operation = operation_from_dump(item, Dump(tmp_path), CHIPS["v5e"])
    assert operation.estimated_cycles == 7466
    assert operation.vmem_bytes == 4096
    assert operation.source == "jit(f)/mul"


def test_a_kernel_without_a_schedule_is_an_error_not_a_free_kernel(tmp_path: Path):
    with pytest.raises(ScheduleFormatError, match="no schedule of kernel"):
        operation_from_dump(work("custom-call", attributes=KERNEL), Dump(tmp_path), CHIPS["v5e"])


def test_equal_operations_share_the_schedule_of_the_first(tmp_path: Path):
    for path in (Path(__file__).parent / "schedule_dumps").glob("*matmul_grid.1-*"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "1-TLP-00-deduplication-map.txt").write_text(
        "key:matmul_grid.1\nordinal:2\nequivalent_hlos[size=2]:\n  matmul_grid.1\n"
        "  custom-call.1\nkey:other.3\nordinal:3\nequivalent_hlos[size=1]:\n  other.3\n"
    )
    assert Dump(tmp_path).texts("absent.1") is None
    operation = operation_from_dump(
        work("custom-call", attributes=KERNEL), Dump(tmp_path), CHIPS["v5e"]
    )
    assert operation.name == "custom-call.1"
    assert operation.cycles == 11 + 22 * 100
