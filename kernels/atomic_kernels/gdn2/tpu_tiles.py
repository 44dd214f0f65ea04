# SPDX-License-Identifier: Apache-2.0
"""How many key heads a grid step takes, and how many tokens a chunk.

Heads of one step are independent work for the scheduler, which otherwise waits for the matrix
unit; each needs its scratch, blocks and code. A step's lanes of a token-major array must be whole
registers, or all there are.

tpu_tiles.json holds static cycles for the heads that were compiled (`atomic_kernels.tune`
makes it). For sizes that it lacks the rule is 6 heads of a step, 3 in a backward with operands in
several parts.
"""

import dataclasses
import functools
import json
from pathlib import Path

from atomic_kernels.gdn2.arithmetic import PRECISION_PARTS
from atomic_kernels.gdn2.tpu_blocks import Plan
from atomic_kernels.gdn2.tpu_layout import LANES

# The first is the default, the matrix unit's width: smaller chunks leave part of it idle.
CHUNK_SIZES = (128, 64)
# Leaves of more heads than fit side by side in the lanes would need a second register row.
MOST_HEADS = 8
TABLE_PATH = Path(__file__).with_name("tpu_tiles.json")
PRECISION_NAMES = {parts: name for name, parts in PRECISION_PARTS.items()}


def tiled(plan: Plan, kernel: str) -> Plan:
    """The plan with its number of heads a grid step; kernel is "forward" or "backward"."""
    if plan.heads:
        return plan
    allowed = [n for n in range(1, min(plan.key_heads, MOST_HEADS) + 1) if _fits(n, plan)]
    if not allowed:
        raise NotImplementedError(
            f"backend 'tpu' cannot cut {plan.key_heads} heads of K = {plan.layout.key_size}, "
            f"V = {plan.value_width} into steps of whole {LANES}-lane registers: pad the heads, "
            "or use backend 'xla'."
        )
    if plan.layout.interpret:
        return dataclasses.replace(plan, heads=allowed[0])
    return dataclasses.replace(plan, heads=_best(allowed, plan, kernel))


def _best(allowed: list[int], plan: Plan, kernel: str) -> int:
    measured = {n: cycles for n, cycles in _cycles(plan, kernel).items() if n in allowed}
    if measured:
        return min(measured, key=lambda n: measured[n])
    wanted = 3 if kernel == "backward" and plan.layout.parts != 1 else 6
    return max((n for n in allowed if n <= wanted), default=allowed[0])


def _cycles(plan: Plan, kernel: str) -> dict[int, float]:
    """Static cycles a token and head, by heads a step; empty if the table lacks the size."""
    layout = plan.layout
    key = table_key(
        precision=PRECISION_NAMES[layout.parts],
        key_size=layout.key_size,
        value_size=layout.value_size,
        projections=plan.projections is not None,
        chunk_size=layout.chunk,
    )
    row = read_table().get(key, {}).get(kernel, {})
    return {int(heads): cycles for heads, cycles in row.items() if cycles is not None}


def table_key(
    *, precision: str, key_size: int, value_size: int, projections: bool, chunk_size: int
) -> str:
    """The name of a row; value_size counts all value heads of a key head."""
    inputs = "projections" if projections else "inputs"
    return f"{precision} K{key_size} V{value_size} {inputs} chunk {chunk_size}"


@functools.cache
def read_table() -> dict[str, dict[str, dict[str, float | None]]]:
    """Row name -> kernel -> heads a step -> static cycles a token and head (None: no compile)."""
    return json.loads(TABLE_PATH.read_text())["cycles_a_token_and_head"]


def _fits(count: int, plan: Plan) -> bool:
    if plan.key_heads % count:
        return False
    widths = [] if plan.keys_head_major else [count * plan.layout.key_size]
    widths += [] if plan.values_head_major else [count * plan.layout.value_size]
    return count == plan.key_heads or all(width % LANES == 0 for width in widths)
