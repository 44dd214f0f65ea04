# SPDX-License-Identifier: Apache-2.0
"""Small programs for the schedule tests, each built so that its counts follow from its text.

Every function returns (function, arguments) as `compile_schedule` wants it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Shape = jax.ShapeDtypeStruct


def matmul_grid(steps: int = 20):
    """`steps` products of a [128, 128] block with another, one a grid step, in bf16."""

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    kernel = pl.pallas_call(
        body,
        grid=(steps,),
        in_specs=[
            pl.BlockSpec((128, 128), lambda i: (i, 0)),
            pl.BlockSpec((128, 128), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((128, 128), lambda i: (i, 0)),
        out_shape=Shape((128 * steps, 128), jnp.float32),
        name="matmul_grid",
    )
    return kernel, (Shape((128 * steps, 128), jnp.bfloat16), Shape((128, 128), jnp.bfloat16))


def nested_loops():
    """One grid of 6 steps; in it 16 trips, then 7 trips of (5 trips and an unknown number)."""

    def body(count_ref, x_ref, o_ref):
        count = count_ref[0]

        def step(_, value):
            return value * x_ref[...] + 1.0

        def nest(_, value):
            value = jax.lax.fori_loop(0, 5, step, value)
            return jax.lax.fori_loop(0, count, step, value)

        value = jax.lax.fori_loop(3, 19, step, x_ref[...])
        o_ref[...] = jax.lax.fori_loop(0, 7, nest, value)

    kernel = pl.pallas_call(
        body,
        grid=(6,),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((8, 128), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        out_shape=Shape((48, 128), jnp.float32),
        name="nested_loops",
    )
    return kernel, (Shape((1,), jnp.int32), Shape((48, 128), jnp.float32))


def scanned_kernel(trips: int = 11):
    """`trips` runs of a kernel in a scan, after a transpose that the compiler must keep."""
    kernel, (rows, columns) = matmul_grid(steps=16)

    def program(x, weights):
        def step(carry, _):
            return (kernel(carry, weights) * 0.5).astype(jnp.bfloat16), None

        carry, _ = jax.lax.scan(step, x, None, length=trips)
        return jnp.transpose(carry.reshape(16, 128, 128), (1, 0, 2))

    return program, (rows, columns)


def repeated_kernel(times: int = 3):
    """The same kernel on `times` arrays, one after another: the compiler builds it once."""
    kernel, (rows, columns) = matmul_grid(steps=16)

    def program(*arrays):
        *inputs, weights = arrays
        return [kernel(x, weights) for x in inputs]

    return program, (*[rows] * times, columns)


def while_kernel():
    """A kernel in a loop that runs until its values say so: no count is known."""
    kernel, (rows, columns) = matmul_grid(steps=16)

    def program(x, weights):
        return jax.lax.while_loop(
            lambda value: jnp.sum(value.astype(jnp.float32)) > 0,
            lambda value: kernel(value, weights).astype(jnp.bfloat16),
            x,
        )

    return program, (rows, columns)


def too_much_vmem():
    """A kernel whose scratch, 256 MiB, no chip can hold."""

    def body(x_ref, o_ref, scratch_ref):
        scratch_ref[:8] = x_ref[...]
        o_ref[...] = scratch_ref[:8] * 2.0

    shape = Shape((8, 128), jnp.float32)
    kernel = pl.pallas_call(
        body,
        out_shape=shape,
        scratch_shapes=[pltpu.VMEM((2**19, 128), jnp.float32)],
        name="too_much_vmem",
    )
    return kernel, (shape,)


def broken():
    """A function that fails while it is traced."""

    def program(x):
        raise KeyError("fault in the traced function")

    return program, (Shape((8, 128), jnp.float32),)
