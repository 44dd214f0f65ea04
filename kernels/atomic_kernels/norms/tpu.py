# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm of groups of channels, and the sums before them: two Pallas TPU kernels.

Each group of G channels of a row x is normalised by itself; LayerNorm takes its mean away first:

    c = x - mean(x), or x        rho = 1 / sqrt(mean(c^2) + epsilon)        n = rho c
    y = scale * n + bias

    dn = scale * dy      dc = rho (dn - n mean(dn * n))      dx = dc - mean(dc), or dc
    dscale = sum over rows of dy * n                         dbias = sum over rows of dy

In a residual network x is a sum, s + read with the stream s = x + delta, and the gradient of s is
dx and what reached s by other ways.

XLA makes a pass over memory of each sum, of each mean and of the result. Here a row is read once
and written once; the backward keeps the summands alone and forms n again. All in float32, but the
stream, which is rounded as it is stored. Sums over rows stay in vector memory, eight rows of them,
until the end.
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
    return _normalise_forward(x, scale, bias, group, centred, epsilon, interpret)[0]


def _normalise_forward(x, scale, bias, group, centred, epsilon, interpret):
    (y,) = _forward((x,), scale, bias, group, centred, epsilon, interpret)
    return y, (x, scale)


def _normalise_backward(group, centred, epsilon, interpret, saved, d_y):
    x, scale = saved
    (d_x,), *sums = _backward((x,), scale, (d_y,), group, centred, epsilon, interpret)
    return d_x, *sums


normalise.defvjp(_normalise_forward, _normalise_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def add_and_normalise(
    x: Array,
    delta: Array,
    read: Array | None,
    scale: Array,
    bias: Array,
    group: int,
    centred: bool,
    epsilon: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The stream s = x + delta, and `normalise` of s + read (of s, if there is no read).

    All [N, D] of one dtype, as both results. Raises ValueError as `normalise` does.
    """
    return _add_forward(x, delta, read, scale, bias, group, centred, epsilon, interpret)[0]


def _add_forward(x, delta, read, scale, bias, group, centred, epsilon, interpret):
    reads = () if read is None else (read,)
    stream, y = _forward((x, delta, *reads), scale, bias, group, centred, epsilon, interpret)
    return (stream, y), (stream, reads, scale)


def _add_backward(group, centred, epsilon, interpret, saved, gradients):
    stream, reads, scale = saved
    d_stream, d_y = gradients
    (d_x, *d_reads), *sums = _backward(
        (stream, *reads), scale, (d_y, d_stream), group, centred, epsilon, interpret
    )
    return d_x, d_x, *(d_reads or (None,)), *sums


add_and_normalise.defvjp(_add_forward, _add_backward)


# Jitted, so that all layers of a model share one trace and one lowering.
@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _forward(terms, scale, bias, group, centred, epsilon, interpret):
    """(y,) of one term; (stream, y) of x, delta and perhaps read."""
    x = terms[0]
    _refuse(x, scale, group)
    count, size = x.shape
    terms = [_pad_rows(term) for term in terms]
    rows = pl.BlockSpec((TILE, size), lambda i: (i, 0))
    vector = pl.BlockSpec((1, size), lambda i: (0, 0))
    result = jax.ShapeDtypeStruct(terms[0].shape, x.dtype)
    results = 1 if len(terms) == 1 else 2
    outputs = pallas_call_in_hbm(
        partial(_forward_body, group=group, centred=centred, epsilon=epsilon, terms=len(terms)),
        grid=(result.shape[0] // TILE,),
        in_specs=[*[rows] * len(terms), vector, vector],
        out_specs=[rows] * results,
        out_shape=[result] * results,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="normalise" if len(terms) == 1 else "add_and_normalise",
        interpret=interpret,
    )(*terms, scale[None].astype(jnp.float32), bias[None].astype(jnp.float32))
    return tuple(output[:count] for output in outputs)


def _forward_body(*refs, group, centred, epsilon, terms):
    (x_ref, *added), (scale_ref, bias_ref, *streams, y_ref) = refs[:terms], refs[terms:]

    def some_rows(step, _):
        rows = _rows(step)
        for columns in _groups(x_ref.shape[1], group):
            at = rows, columns
            x = x_ref[at]
            if added:
                x = (_wide(x_ref, at) + _wide(added[0], at)).astype(x_ref.dtype)
                streams[0][at] = x
            x = _plus(x, added[1:], at)
            normal, _ = _normal(x, centred, epsilon)  # [ROWS, G]
            y = normal * scale_ref[:, columns] + bias_ref[:, columns]
            y_ref[at] = y.astype(y_ref.dtype)
        return 0

    lax.fori_loop(0, TILE // ROWS, some_rows, 0, unroll=_unroll(x_ref.shape[1], group))


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _backward(terms, scale, gradients, group, centred, epsilon, interpret):
    """terms (x,) or (stream, read); gradients (dy,) or (dy, what reached the stream otherwise).

    Returns those of the terms, of scale and of bias."""
    (x, *_), (count, size) = terms, terms[0].shape
    # Rows of zeros add nothing to the sums.
    arrays = [_pad_rows(array) for array in (*terms, *gradients)]
    rows = pl.BlockSpec((TILE, size), lambda i: (i, 0))
    vector = pl.BlockSpec((1, size), lambda i: (0, 0))
    sums = pl.BlockSpec((SUBLANES, size), lambda i: (0, 0))
    sum_shape = jax.ShapeDtypeStruct((SUBLANES, size), jnp.float32)
    result = jax.ShapeDtypeStruct(arrays[0].shape, x.dtype)
    *d_terms, d_scale, d_bias = pallas_call_in_hbm(
        partial(_backward_body, group=group, centred=centred, epsilon=epsilon, terms=len(terms)),
        grid=(result.shape[0] // TILE,),
        in_specs=[vector, *[rows] * len(arrays)],
        out_specs=[*[rows] * len(terms), sums, sums],
        out_shape=[*[result] * len(terms), sum_shape, sum_shape],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="normalise_backward" if len(gradients) == 1 else "add_and_normalise_backward",
        interpret=interpret,
    )(scale[None].astype(jnp.float32), *arrays)
    return tuple(d_term[:count] for d_term in d_terms), d_scale.sum(0), d_bias.sum(0)


def _backward_body(scale_ref, *refs, group, centred, epsilon, terms):
    (x_ref, *reads), gradients = refs[:terms], refs[terms : -terms - 2]
    d_y_ref, *others = gradients
    d_x_ref, *d_reads, d_scale_ref, d_bias_ref = refs[-terms - 2 :]

    @pl.when(pl.program_id(0) == 0)
    def _start():
        d_scale_ref[:] = jnp.zeros_like(d_scale_ref)
        d_bias_ref[:] = jnp.zeros_like(d_bias_ref)

    def some_rows(step, _):
        rows = _rows(step)
        for columns in _groups(x_ref.shape[1], group):
            at = rows, columns
            x = _plus(x_ref[at], reads, at)
            normal, inverse = _normal(x, centred, epsilon)  # [ROWS, G], [ROWS, 1]
            d_y = _wide(d_y_ref, at)
            d_normal = d_y * scale_ref[:, columns]
            d_x = d_normal - normal * jnp.mean(d_normal * normal, axis=1, keepdims=True)
            if centred:
                # mean(n) is 0, so the mean of what stands above is that of dn.
                d_x = d_x - jnp.mean(d_normal, axis=1, keepdims=True)
            d_x = inverse * d_x
            for d_read in d_reads:
                d_read[at] = d_x.astype(d_read.dtype)
            d_x_ref[at] = _plus(d_x, others, at).astype(d_x_ref.dtype)
            d_scale_ref[:, columns] += _fold(d_y * normal)
            d_bias_ref[:, columns] += _fold(d_y)
        return 0

    lax.fori_loop(0, TILE // ROWS, some_rows, 0, unroll=_unroll(x_ref.shape[1], group))


def _wide(ref, at) -> Array:
    return ref[at].astype(jnp.float32)


def _plus(x: Array, refs, at) -> Array:
    """x and what lies at the same place of `refs`, in float32."""
    return sum((_wide(ref, at) for ref in refs), x.astype(jnp.float32))


def _normal(x: Array, centred: bool, epsilon: float) -> tuple[Array, Array]:
    """n [ROWS, G] and rho [ROWS, 1] of one group x [ROWS, G], all float32."""
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
