# SPDX-License-Identifier: Apache-2.0
"""How the chunk functions multiply: operand rounding, and the precision of each product.

A matrix unit multiplies bfloat16 and adds in float32. Three ways of using one:

    "bf16"    round(a) round(b)                                  one pass,   operand error 2^-9
    "bf16x3"  a_h b_h + (a_h b_l + a_l b_h),  x_h = round(x)     three passes, about 2^-17
                                              x_l = round(x - x_h)
    "f32"     a b in float32                                     six passes on a TPU

On a CPU the same roundings are made and the products are added in float32, so an error measured
there is the error of the matrix unit up to the order of the sums. The three precisions that a
caller can ask for are sets of these, one for each kind of product.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

# Contracted axes of the two operands, counted from the end.
_CONTRACTED = {"nn": (-1, -2), "nt": (-1, -1), "tn": (-2, -2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotPrecision:
    """The precision ("bf16", "bf16x3" or "f32") of each kind of product in a chunk."""

    near_scores: str  # q k^T and (b k) k^T within a leaf of rows, and their gradients
    far_scores: str  # the same between leaves
    inverse: str  # the block ladder
    solve: str  # A R, A^T dVn
    read: str  # what is read from the state: Kb S, Qt S, and their gradients
    output: str  # Aqk Vn, Aqk^T dO
    update: str  # what is written to the state: Kg^T Vn, and its gradients
    pairs: str  # dO Vn^T, dR Vn^T


def dot(a: Array, b: Array, precision: str, layout: str = "nn") -> Array:
    """Product over the last two axes, earlier axes batched, float32 in and out.

    layout "nn": a b, [.., M, N] @ [.., N, P]; "nt": a b^T; "tn": a^T b.
    """
    if precision == "f32":
        return _product(a, b, layout)
    a_high, b_high = _round_to_bfloat16(a), _round_to_bfloat16(b)
    high = _product(a_high, b_high, layout)
    if precision == "bf16":
        return high
    if precision != "bf16x3":
        raise ValueError(f"precision must be 'bf16', 'bf16x3' or 'f32', got {precision!r}.")
    a_low = _round_to_bfloat16(a - a_high.astype(jnp.float32))
    b_low = _round_to_bfloat16(b - b_high.astype(jnp.float32))
    return high + (_product(a_high, b_low, layout) + _product(a_low, b_high, layout))


def _round_to_bfloat16(x: Array) -> Array:
    """XLA may drop a float32 -> bfloat16 -> float32 pair of casts, as it counts excess precision
    as harmless; it may not drop a reduce_precision."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _product(a: Array, b: Array, layout: str) -> Array:
    contract_a, contract_b = (axis + a.ndim for axis in _CONTRACTED[layout])
    batch = tuple(range(a.ndim - 2))
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), (batch, batch)),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _uniform(precision: str) -> DotPrecision:
    names = [field.name for field in dataclasses.fields(DotPrecision)]
    return DotPrecision(**dict.fromkeys(names, precision))


# One pass is enough where an error stays one error in the result: reading the state, and scores
# between near rows. It is not where the products of many tokens cancel. With nearly identical
# keys Vn holds differences of successive values, and O, S' and dR are sums that telescope over the
# chunk: one pass there gives 4e-2 in dv, db, dw and 2e-2 in the state where three give 6e-3 and
# 3e-3 (T 1000, K = V = 64, b <= 2, decay -1e-3; the limits are 1e-2 and 6e-3). Rounding errors of
# a row of scores add as the square root of its columns; a leaf holds 15 of a chunk's 63 or 127.
DOT_PRECISIONS: dict[str, DotPrecision] = {
    "bf16": dataclasses.replace(_uniform("bf16x3"), near_scores="bf16", read="bf16"),
    "bf16x3": _uniform("bf16x3"),
    "f32": _uniform("f32"),
}


def default_precision(dtype: jax.typing.DTypeLike, platform: str) -> str:
    """The precision for inputs of `dtype`: bfloat16 -> "bf16"; float32 -> "f32", or "bf16x3" on
    a TPU, whose matrix unit has no float32 product (1e-4 instead of 2e-5, at half the passes)."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return "bf16"
    return "bf16x3" if platform == "tpu" else "f32"
