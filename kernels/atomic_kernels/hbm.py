# SPDX-License-Identifier: Apache-2.0
"""Kernel launches whose operands and results lie in HBM, whatever else the program holds.

Where XLA finds room it puts a kernel's operands into vector memory, and then compiles that kernel
again: a training step has twenty equal ones, and each placement would be compiled for itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def pallas_call_in_hbm(
    body: Callable,
    *,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    interpret: Any,
    **options: Any,
) -> Callable[..., list[Array]]:
    """`pl.pallas_call` of the same arguments; the interpreter has one memory and gets no placement.

    The call is jitted, since only a compiled program can be told a placement.
    """
    if interpret:
        return pl.pallas_call(body, out_shape=list(out_shape), interpret=interpret, **options)
    placed = [pltpu.HBM(x.shape, x.dtype) for x in out_shape]
    call = pl.pallas_call(body, out_shape=placed, **options)

    def run(*operands: Array) -> list[Array]:
        return call(*[pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands])

    return jax.jit(run, inline=True)
