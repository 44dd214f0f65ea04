# SPDX-License-Identifier: Apache-2.0
"""How many key heads a grid step takes.

Heads of one step are independent work for the scheduler, which otherwise waits for the matrix
unit; each needs its scratch, blocks and code. A step's lanes must be whole registers, or all
there are, as must those of every block.
"""

import dataclasses

from atomic_kernels.gdn2.tpu_layout import LANES
from atomic_kernels.gdn2.tpu_tokens import InputArrays, Plan

CHUNK_SIZE = 128  # the matrix unit's width: smaller chunks leave part of it idle
# Leaves of more heads than fit side by side in the lanes would need a second register row.
MOST_HEADS = 8


def tiled(plan: Plan, arrays: InputArrays, kernel: str) -> Plan:
    """The plan with its number of heads a grid step."""
    heads = arrays.q.shape[2] // plan.layout.key_size
    allowed = [n for n in range(1, min(heads, MOST_HEADS) + 1) if _fits(n, heads, plan)]
    if not allowed:
        raise NotImplementedError(
            f"backend 'tpu' cannot cut {heads} heads of K = {plan.layout.key_size}, "
            f"V = {plan.value_width} into steps of whole {LANES}-lane registers: pad the heads, "
            "or use backend 'xla'."
        )
    if plan.layout.interpret:
        return dataclasses.replace(plan, heads=allowed[0])
    wanted = 3 if kernel == "backward" and plan.layout.parts != 1 else 6
    return dataclasses.replace(plan, heads=max(n for n in allowed if n <= max(wanted, allowed[0])))


def _fits(count: int, heads: int, plan: Plan) -> bool:
    if heads % count:
        return False
    widths = (count * plan.layout.key_size, count * plan.layout.value_size)
    return count == heads or all(width % LANES == 0 for width in widths)
