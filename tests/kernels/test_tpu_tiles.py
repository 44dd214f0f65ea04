# SPDX-License-Identifier: Apache-2.0
"""Protects the choice of heads a grid step: the fastest that the table knows, or the stated rule.

The oracle is the table itself, read here as plain JSON, and the rule as its docstring states it.
"""

import json

import pytest
from atomic_kernels.gdn2.tpu_blocks import Plan, head_major
from atomic_kernels.gdn2.tpu_layout import Layout
from atomic_kernels.gdn2.tpu_tiles import TABLE_PATH, tiled

KERNELS = ("forward", "backward")
TABLE = json.loads(TABLE_PATH.read_text())["cycles_a_token_and_head"]
MEASURED = TABLE["bf16 K128 V128 inputs chunk 128"]


def plan(heads: int, *, size: int = 128, parts: int = 1, interpret: bool = False) -> Plan:
    layout = Layout(chunk=128, key_size=size, value_size=size, parts=parts, interpret=interpret)
    return Plan(
        layout=layout, key_heads=heads, heads=0, group=1, scale=1.0, length=256, segmented=False,
        keys_head_major=head_major(heads), values_head_major=head_major(heads), projections=None,
        decay_rows=False,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [1, 3, 4, 6, 8, 12, 16, 40])
def test_the_fastest_divisor_in_the_table_is_taken(heads: int, kernel: str):
    cycles = {int(n): x for n, x in MEASURED[kernel].items() if heads % int(n) == 0}
    chosen = tiled(plan(heads), kernel).heads
    assert heads % chosen == 0
    assert cycles[chosen] == min(cycles.values())


@pytest.mark.parametrize(
    ("heads", "parts", "kernel", "expected"),
    [(12, 0, "forward", 6), (12, 0, "backward", 3), (8, 0, "forward", 4), (7, 0, "forward", 1),
     (5, 0, "backward", 1), (1, 0, "backward", 1)],
)  # fmt: skip
def test_outside_the_table_the_rule_decides(heads: int, parts: int, kernel: str, expected: int):
    assert tiled(plan(heads, parts=parts), kernel).heads == expected


def test_the_interpreter_takes_the_fewest_heads():
    assert tiled(plan(8, interpret=True), "forward").heads == 1
    assert tiled(plan(8, size=64, interpret=True), "forward").heads == 2  # whole registers


def test_heads_that_cannot_be_cut_are_refused():
    """16 heads of 4 lanes: 8 of them are no whole register, and more are too many."""
    with pytest.raises(NotImplementedError, match="cannot cut 16 heads of K = 4"):
        tiled(plan(16, size=4), "forward")
