# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm of groups of channels, as two Pallas TPU kernels.

Each group of G channels of a row x is normalised by itself; LayerNorm takes its mean away first:

    c = x - mean(x), or x        rho = 1 / sqrt(mean(c^2) + epsilon)        n = rho c
    y = scale * n + bias

    dn = scale * dy      dc = rho (dn - n mean(dn * n))      dx = dc - mean(dc), or dc
    dscale = sum over rows of dy * n                         dbias = sum over rows of dy

XLA makes a pass over memory of each mean and of the result. Here a row is read once and written
once, 2 (backward 3) arrays of 2 D bytes a token; the backward keeps x alone and forms n again.
All in float32. Sums over rows stay in vector memory, eight rows of them, until the end.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.hbm import pallas_call_in_hbm

LANES, SUBLANES = 128, 8
# Rows that are in registers at one time: 16 x 1024 float32 are 16 of the 64 vector registers; a
# packed bfloat16 register holds 16 rows.
ROWS = 16
TILE = 256  # rows of a grid step


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def normalise(
    x: Array,
    scale: Array,
    bias: Array,
    group: int,
    centred: bool,
    epsilon: float,
    interpret: bool = False,
) -> Array:
    """LayerNorm (centred) or RMSNorm of each `group` channels of x [N, D], in x's dtype.

    scale and bias [D] float32; D a multiple of group, group one of 128. Raises ValueError for other
    shapes.
    """
    return _forward(x, scale, bias, group, centred, epsilon, interpret)


def _forward_rule(x, scale, bias, group, centred, epsilon, interpret):
    return normalise(x, scale, bias, group, centred, epsilon, interpret), (x, scale)


def _backward_rule(group, centred, epsilon, interpret, saved, d_y):
    return _backward(*saved, d_y, group, centred, epsilon, interpret)


normalise.defvjp(_forward_rule, _backward_rule)


# Jitted, so that all layers of a model share one trace and one lowering.
@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _forward(x, scale, bias, group, centred, epsilon, interpret):
    _refuse(x, scale, group)
    count, size = x.shape
    x = _pad_rows(x)
    rows = pl.BlockSpec((TILE, size), lambda i: (i, 0))
    vector = pl.BlockSpec((1, size), lambda i: (0, 0))
    (y,) = pallas_call_in_hbm(
        partial(_forward_body, group=group, centred=centred, epsilon=epsilon),
        grid=(x.shape[0] // TILE,),
        in_specs=[rows, vector, vector],
        out_specs=[rows],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="normalise",
        interpret=interpret,
    )(x, scale[None].astype(jnp.float32), bias[None].astype(jnp.float32))
    return y[:count]


def _forward_body(x_ref, scale_ref, bias_ref, y_ref, *, group, centred, epsilon):
    def some_rows(step, _):
        rows = _rows(step)
        for columns in _groups(x_ref.shape[1], group):
            normal, _ = _normal(x_ref[rows, columns], centred, epsilon)  # [ROWS, G]
            y = normal * scale_ref[:, columns] + bias_ref[:, columns]
            y_ref[rows, columns] = y.astype(y_ref.dtype)
        return 0

    lax.fori_loop(0, TILE // ROWS, some_rows, 0, unroll=_unroll(x_ref.shape[1], group))


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _backward(x, scale, d_y, group, centred, epsilon, interpret):
    count, size = x.shape
    padded, d_y = _pad_rows(x), _pad_rows(d_y)  # rows of zeros add nothing to the sums
    rows = pl.BlockSpec((TILE, size), lambda i: (i, 0))
    vector = pl.BlockSpec((1, size), lambda i: (0, 0))
    sums = pl.BlockSpec((SUBLANES, size), lambda i: (0, 0))
    sum_shape = jax.ShapeDtypeStruct((SUBLANES, size), jnp.float32)
    d_x, d_scale, d_bias = pallas_call_in_hbm(
        partial(_backward_body, group=group, centred=centred, epsilon=epsilon),
        grid=(padded.shape[0] // TILE,),
        in_specs=[rows, vector, rows],
        out_specs=[rows, sums, sums],
        out_shape=[jax.ShapeDtypeStruct(padded.shape, x.dtype), sum_shape, sum_shape],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="normalise_backward",
        interpret=interpret,
    )(padded, scale[None].astype(jnp.float32), d_y)
    return d_x[:count], d_scale.sum(0), d_bias.sum(0)


def _backward_body(
    x_ref, scale_ref, d_y_ref, d_x_ref, d_scale_ref, d_bias_ref, *, group, centred, epsilon
):
    @pl.when(pl.program_id(0) == 0)
    def _start():
        d_scale_ref[:] = jnp.zeros_like(d_scale_ref)
        d_bias_ref[:] = jnp.zeros_like(d_bias_ref)

    def some_rows(step, _):
        rows = _rows(step)
        for columns in _groups(x_ref.shape[1], group):
            normal, inverse = _normal(
                x_ref[rows, columns], centred, epsilon
            )  # [ROWS, G], [ROWS, 1]
            d_y = d_y_ref[rows, columns].astype(jnp.float32)
            d_normal = d_y * scale_ref[:, columns]
            d_x = d_normal - normal * jnp.mean(d_normal * normal, axis=1, keepdims=True)
            if centred:
                # mean(n) is 0, so the mean of what stands above is that of dn.
                d_x = d_x - jnp.mean(d_normal, axis=1, keepdims=True)
            d_x_ref[rows, columns] = (inverse * d_x).astype(d_x_ref.dtype)
            d_scale_ref[:, columns] += _fold(d_y * normal)
            d_bias_ref[:, columns] += _fold(d_y)
        return 0

    lax.fori_loop(0, TILE // ROWS, some_rows, 0, unroll=_unroll(x_ref.shape[1], group))


def _normal(x: Array, centred: bool, epsilon: float) -> tuple[Array, Array]:
    """n [ROWS, G] and rho [ROWS, 1] of one group, float32."""
    x = x.astype(jnp.float32)
    if centred:
        x = x - jnp.mean(x, axis=1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + epsilon)
    return x * inverse, inverse


def _rows(step: Array):
    return pl.ds(pl.multiple_of(step * ROWS, ROWS), ROWS)


def _unroll(size: int, group: int) -> int:
    """Steps side by side, so that one's arithmetic fills the other's waits for sums over lanes. Of
    [8192, 1024] bfloat16 and one group, 4 take 54,000 cycles forward and 86,000 backward, 1 takes
    176,000 and 253,000; several groups of a step are as independent as several steps."""
    return 4 if group == size else 2


def _groups(size: int, group: int) -> list[slice]:
    return [slice(start, start + group) for start in range(0, size, group)]


def _fold(x: Array) -> Array:
    """Sums of every eighth row: [ROWS, G] -> [8, G]."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(0)


def _pad_rows(x: Array) -> Array:
    return jnp.pad(x, ((0, -x.shape[0] % TILE), (0, 0)))


def _refuse(x: Array, scale: Array, group: int) -> None:
    if x.ndim != 2 or scale.shape != x.shape[1:] or x.shape[1] % group or group % LANES:
        raise ValueError(
            f"normalise: x must be [N, D] with scale [D], D a multiple of group and group one of "
            f"{LANES}; got x {x.shape}, scale {scale.shape}, group {group}"
        )
