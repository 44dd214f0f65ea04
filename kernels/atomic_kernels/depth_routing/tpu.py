# SPDX-License-Identifier: Apache-2.0
"""Three Pallas TPU kernels of depth routing: what a site reads, and what a source receives.

At each of N tokens a site with weight w [D] reads its n sources v_j [D]:

    rho_j = 1 / sqrt(mean(v_j^2) + epsilon)      s_j = rho_j (w . v_j)
    a = softmax(s)                               r = sum_j a_j v_j

Each source has m sites that read it. From their dr_i, their a_i for this source,
c_i = dr_i . r_i, and what reaches the source by each other way, dv_k:

    ds_i = a_i (dr_i . v - c_i)
    dv = sum_k dv_k + sum_i a_i dr_i + sum_i rho ds_i w_i - rho^2 / D (sum_i ds_i s_i) v
    dw_i = sum over tokens of rho ds_i v

The kernels read every [N, D] operand once; that is what bounds them (n + 1 arrays of 2 D bytes a
token for a read, 2 for c, m + 2 and one for each dv_k for a source). Nothing is sequential over
tokens but the sum of dw, which stays in VMEM. Arithmetic is float32; operands of the three small
matrix products of `source_gradients` are rounded to the dtype of v. Numbers of one site and token
cross between HBM and the chip as rows of a [8 k, N] array: as columns they would take 128 lanes
each.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.hbm import pallas_call_in_hbm

LANES, SUBLANES = 128, 8
# Tokens that are in registers at one time: 16 x 1024 float32 are 16 of the 64 vector registers, for
# a source, a sum and one operand; a packed bfloat16 register holds 16 rows.
ROWS = 16
# Tokens of a grid step. 30 consumers x 256 x 1024 bfloat16, fetched ahead once, are 31 MiB of VMEM.
READ_TILE = 256
GRADIENT_TILES = ((16, 256), (LANES, 128))  # (consumers at most, tokens)
VMEM_LIMIT_BYTES = 64 * 2**20


def read_sources(
    weight: Array, values: Sequence[Array], *, epsilon: float, interpret: bool = False
) -> tuple[Array, Array]:
    """What a site reads, and its shares.

    weight [D] float32; values: 1 to 128 arrays [N, D] of one dtype, D a multiple of 128. Returns r
    [N, D] in their dtype and a [n, N] float32. Raises ValueError for other shapes.
    """
    _refuse(values, weight.shape[-1:])
    tokens, size = values[0].shape
    padded = [_pad_rows(value, READ_TILE) for value in values]
    rows = padded[0].shape[0]
    count = _round_up(len(values), SUBLANES)
    array = pl.BlockSpec((READ_TILE, size), lambda i: (i, 0))
    read, shares = pallas_call_in_hbm(
        partial(_read_body, epsilon=epsilon),
        grid=(rows // READ_TILE,),
        in_specs=[pl.BlockSpec((1, size), lambda i: (0, 0)), *[array] * len(values)],
        out_specs=[array, pl.BlockSpec((count, READ_TILE), lambda i: (0, i))],
        out_shape=[
            jax.ShapeDtypeStruct((rows, size), values[0].dtype),
            jax.ShapeDtypeStruct((count, rows), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((READ_TILE, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        name=f"depth_read_{len(values)}",
        interpret=interpret,
    )(weight[None].astype(jnp.float32), *padded)
    return read[:tokens], shares[: len(values), :tokens]


def _read_body(weight_ref, *refs, epsilon: float):
    """One tile: scores and softmax column by column, then the weighted sum."""
    *value_refs, read_ref, shares_ref, columns_ref = refs
    count = len(value_refs)

    def some_rows(step, _):
        rows = pl.ds(pl.multiple_of(step * ROWS, ROWS), ROWS)
        weight = weight_ref[:]  # [1, D]
        scores = []  # n x [ROWS, 1]
        for value_ref in value_refs:
            value = value_ref[rows, :].astype(jnp.float32)  # [ROWS, D]
            mean_square = jnp.mean(value * value, axis=1, keepdims=True)
            product = jnp.sum(value * weight, axis=1, keepdims=True)
            scores.append(product * lax.rsqrt(mean_square + epsilon))
        largest = scores[0]
        for score in scores[1:]:
            largest = jnp.maximum(largest, score)
        weights = [jnp.exp(score - largest) for score in scores]
        total = weights[0]
        for part in weights[1:]:
            total = total + part
        shares = [part / total for part in weights]
        read = jnp.zeros((ROWS, weight.shape[1]), jnp.float32)
        columns = jnp.zeros((ROWS, LANES), jnp.float32)
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        for index in range(count):
            read = read + shares[index] * value_refs[index][rows, :].astype(jnp.float32)
            columns = jnp.where(lane == index, shares[index], columns)
        read_ref[rows, :] = read.astype(read_ref.dtype)
        columns_ref[rows, :] = columns
        return 0

    lax.fori_loop(0, READ_TILE // ROWS, some_rows, 0)
    shares_ref[:] = columns_ref[:].T[: shares_ref.shape[0]]  # [n, tile]


def row_products(a: Array, b: Array, *, interpret: bool = False) -> Array:
    """sum over D of a * b at each token: c of a site from its dr and r.

    a, b [N, D] of one dtype, D a multiple of 128. Returns [N] float32. Raises ValueError for other
    shapes.
    """
    _refuse([a, b], a.shape[1:])
    tokens, size = a.shape
    padded = [_pad_rows(x, READ_TILE) for x in (a, b)]
    rows = padded[0].shape[0]
    (products,) = pallas_call_in_hbm(
        _products_body,
        grid=(rows // READ_TILE,),
        in_specs=[pl.BlockSpec((READ_TILE, size), lambda i: (i, 0))] * 2,
        out_specs=[pl.BlockSpec((SUBLANES, READ_TILE), lambda i: (0, i))],
        out_shape=[jax.ShapeDtypeStruct((SUBLANES, rows), jnp.float32)],
        scratch_shapes=[pltpu.VMEM((READ_TILE, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="depth_row_products",
        interpret=interpret,
    )(*padded)
    return products[0, :tokens]


def _products_body(a_ref, b_ref, products_ref, columns_ref):
    def some_rows(step, _):
        rows = pl.ds(pl.multiple_of(step * ROWS, ROWS), ROWS)
        product = a_ref[rows, :].astype(jnp.float32) * b_ref[rows, :].astype(jnp.float32)
        column = jnp.sum(product, axis=1, keepdims=True)  # [ROWS, 1]
        columns_ref[rows, :] = jnp.broadcast_to(column, (ROWS, LANES))
        return 0

    lax.fori_loop(0, READ_TILE // ROWS, some_rows, 0, unroll=4)
    products_ref[:] = columns_ref[:].T[:SUBLANES]  # [8, tile], all rows alike


def source_gradients(
    value: Array,
    direct: Sequence[Array],
    weights: Array,
    shares: Array,
    corrections: Array,
    read_gradients: Sequence[Array],
    *,
    epsilon: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The gradients of a source and of its sites' weights.

    value [N, D], D a multiple of 128, and direct, the dv_k, like it; for its m sites (1 to 128):
    weights [m, D], shares a and corrections c [m, N] float32, read_gradients dr m x [N, D] of
    value's dtype. Returns dv [N, D] in value's dtype and dw [m, D] float32. Raises ValueError for
    other shapes.
    """
    _refuse([value, *read_gradients], weights.shape[1:])
    _refuse([value, *direct], weights.shape[1:])
    tokens, size = value.shape
    count = len(read_gradients)
    tile = next(tokens for most, tokens in GRADIENT_TILES if count <= most)
    padded = [_pad_rows(array, tile) for array in (value, *direct, *read_gradients)]
    rows = padded[0].shape[0]
    height = _round_up(count, SUBLANES)
    numbers = [
        jnp.pad(x.astype(jnp.float32), ((0, height - count), (0, rows - tokens)))
        for x in (shares, corrections)
    ]
    table = jnp.pad(weights, ((0, LANES - count), (0, 0))).astype(value.dtype)
    array = pl.BlockSpec((tile, size), lambda i: (i, 0))
    whole = pl.BlockSpec((LANES, size), lambda i: (0, 0))
    d_value, d_weights = pallas_call_in_hbm(
        partial(_gradient_body, direct_count=len(direct), tile=tile, epsilon=epsilon),
        grid=(rows // tile,),
        in_specs=[
            whole,
            *[pl.BlockSpec((height, tile), lambda i: (0, i))] * 2,
            *[array] * len(padded),
        ],
        out_specs=[array, whole],
        out_shape=[
            jax.ShapeDtypeStruct((rows, size), value.dtype),
            jax.ShapeDtypeStruct((LANES, size), jnp.float32),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((tile, LANES), jnp.float32)] * 3,
            pltpu.VMEM((tile, size), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        name=f"depth_gradient_{count}",
        interpret=interpret,
    )(table, *numbers, *padded)
    return d_value[:tokens], d_weights[:count]


def _gradient_body(
    table_ref, shares_ref, corrections_ref, value_ref, *refs, direct_count, tile, epsilon
):
    """One tile: score gradients and the direct shares, then the share through the scores."""
    direct_refs, refs = refs[:direct_count], refs[direct_count:]
    *gradient_refs, d_value_ref, d_table_ref, share_ref, correction_ref, d_score_ref, sum_ref = refs
    _as_columns(shares_ref, share_ref)
    _as_columns(corrections_ref, correction_ref)

    def some_rows(step, _):
        rows = pl.ds(pl.multiple_of(step * ROWS, ROWS), ROWS)
        value = value_ref[rows, :].astype(jnp.float32)  # [ROWS, D]
        shares = share_ref[rows, :]  # [ROWS, LANES], a column a site
        lane = lax.broadcasted_iota(jnp.int32, shares.shape, 1)
        total = jnp.zeros_like(value)
        for direct_ref in direct_refs:
            total = total + direct_ref[rows, :].astype(jnp.float32)
        products = jnp.zeros_like(shares)
        for index, gradient_ref in enumerate(gradient_refs):
            gradient = gradient_ref[rows, :].astype(jnp.float32)  # [ROWS, D]
            product = jnp.sum(gradient * value, axis=1, keepdims=True)
            products = jnp.where(lane == index, product, products)
            total = total + shares[:, index : index + 1] * gradient
        sum_ref[rows, :] = total
        d_score_ref[rows, :] = shares * (products - correction_ref[rows, :])
        return 0

    lax.fori_loop(0, tile // ROWS, some_rows, 0)
    dtype = value_ref.dtype
    value = value_ref[:].astype(jnp.float32)  # [tile, D]
    size = value.shape[1]
    inverse = lax.rsqrt(jnp.sum(value * value, axis=1, keepdims=True) / size + epsilon)
    d_scores = d_score_ref[:]  # [tile, LANES]
    # [tile, D] x [LANES, D] -> [tile, LANES]
    scores = inverse * _dot(value_ref[:], table_ref[:], ((1,), (1,)))
    along = jnp.sum(d_scores * scores, axis=1, keepdims=True) * inverse * inverse / size
    d_products = (d_scores * inverse).astype(dtype)  # [tile, LANES]
    through_scores = _dot(d_products, table_ref[:], ((1,), (0,)))  # [tile, D]
    d_value_ref[:] = (sum_ref[:] + through_scores - along * value).astype(dtype)

    @pl.when(pl.program_id(0) == 0)
    def _start():
        d_table_ref[:] = jnp.zeros_like(d_table_ref)

    d_table_ref[:] += _dot(d_products, value_ref[:], ((0,), (0,)))  # [LANES, D]


def _as_columns(rows_ref, columns_ref) -> None:
    """[8 k, tile] -> [tile, LANES], the rest 0."""
    height, tile = rows_ref.shape
    rows = jnp.concatenate([rows_ref[:], jnp.zeros((LANES - height, tile), jnp.float32)])
    columns_ref[:] = rows.T


def _dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _pad_rows(array: Array, tile: int) -> Array:
    rows = _round_up(array.shape[0], tile)
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0)))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _refuse(arrays: Sequence[Array], size: tuple[int, ...]) -> None:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if len(shape) != 2 or shape[1:] != size or size[0] % LANES:
        raise ValueError(
            f"depth routing: arrays must be [N, D] with D {size} a multiple of {LANES}, got {shape}"
        )
    if not 0 < len(arrays) <= LANES:
        raise ValueError(f"depth routing: {len(arrays)} arrays; a kernel takes 1 to {LANES}")
    for array in arrays:
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"depth routing: arrays must be alike, got {dtype} {shape} and {array.dtype} "
                f"{array.shape}"
            )
