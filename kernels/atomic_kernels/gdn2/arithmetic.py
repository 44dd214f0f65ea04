# SPDX-License-Identifier: Apache-2.0
"""How the chunk functions multiply: the rounding of operands for a matrix unit.

A matrix unit multiplies bfloat16 and adds in float32. A float32 operand x is given to it as parts,

    x = x_1 + x_2 + ..    x_1 = round(x)    x_2 = round(x - x_1)    ..

and a product is made of the pairs of parts that are not below the last part kept: one by one part
takes one pass (error 2^-9 an operand), two by two three passes (2^-17), two by one two.

One part is enough where an error stays one error in the result: reading the state, and scores
between near tokens. It is not where the products of many tokens cancel. With nearly identical keys
Vn holds differences of successive values, and O, S' and dR are sums that telescope over the chunk:
one pass there gives 4e-2 in dv, db, dw and 2e-2 in the state where three give 6e-3 and 3e-3
(T 1000, K = V = 64, b <= 2, decay -1e-3; the limits are 1e-2 and 6e-3). Such operands are *fine*,
of one part more than the *coarse* others; `chunk` says which are. LAB_LOG.md has what each costs.

On a CPU the same roundings are made and the products are added in float32, so an error measured
there is the error of the matrix unit up to the order of the sums.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# The parts of one float32 array.
Operand = tuple[Array, ...]

# Axes that a product contracts, counted from the end: a b, a b^T and a^T b.
NN, NT, TN = (-1, -2), (-1, -1), (-2, -2)

# Parts of a coarse operand by the name of the precision; 0: float32 operands, six passes on a TPU.
PRECISION_PARTS = {"bf16": 1, "bf16x3": 2, "f32": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """Makes operands of `parts` bfloat16 arrays, fine ones of one more; 0 keeps float32.

    XLA may drop a float32 -> bfloat16 -> float32 pair of casts, as it counts excess precision as
    harmless, but not a reduce_precision; Mosaic has casts alone, and drops none (`by_casts`).
    """

    parts: int
    by_casts: bool = False

    @property
    def coarse_parts(self) -> int:
        """Arrays of a coarse operand."""
        return max(self.parts, 1)

    @property
    def fine_parts(self) -> int:
        """Arrays of a fine operand."""
        return self.parts + 1

    @property
    def dtype(self) -> Any:
        """Of those arrays."""
        return jnp.bfloat16 if self.parts else jnp.float32

    def coarse(self, x: Array | Operand) -> Operand:
        """x [.., M, N], or the first parts of what has been split before."""
        return self._split(x, self.coarse_parts)

    def fine(self, x: Array | Operand) -> Operand:
        """The same with one part more; bfloat16 is exact as it is."""
        return self._split(x, self.fine_parts)

    def _split(self, x: Array | Operand, count: int) -> Operand:
        if isinstance(x, tuple):
            return x[:count]
        if not self.parts:
            return (x.astype(jnp.float32),)
        if x.dtype == jnp.bfloat16:
            return (x,)
        parts = [self._round(x)]
        while len(parts) < count:
            x = x - parts[-1].astype(jnp.float32)
            parts.append(self._round(x))
        return tuple(parts)

    def _round(self, x: Array) -> Array:
        if not self.by_casts:
            x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x.astype(jnp.bfloat16)


def join(operand: Operand) -> Array:
    """The float32 value that an operand stands for."""
    total = operand[-1].astype(jnp.float32)
    for part in reversed(operand[:-1]):
        total = total + part.astype(jnp.float32)
    return total


def dot(a: Operand, b: Operand, contracted: tuple[int, int]) -> Array:
    """Product over the last two axes, earlier axes batched, float32; contracted: NN, NT or TN."""
    kept = max(len(a), len(b))
    pairs = [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < kept]
    products = [_product(x, y, contracted) for x, y in reversed(pairs)]  # the small terms first
    return functools.reduce(operator.add, products)


def _product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    of_a, of_b = (axis + a.ndim for axis in contracted)
    batch = tuple(range(a.ndim - 2))
    return lax.dot_general(
        a,
        b,
        (((of_a,), (of_b,)), (batch, batch)),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def default_precision(dtype: jax.typing.DTypeLike, platform: str) -> str:
    """The precision for inputs of `dtype`: bfloat16 -> "bf16"; float32 -> "f32", or "bf16x3" on
    a TPU, whose matrix unit has no float32 product (1e-4 instead of 2e-5, at half the passes)."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return "bf16"
    return "bf16x3" if platform == "tpu" else "f32"
