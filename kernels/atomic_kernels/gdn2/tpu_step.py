# SPDX-License-Identifier: Apache-2.0
"""One token of GDN-2 on a TPU: the state is read once, written once, in place.

    S~ = Diag(exp g) S      r = w*v - S~^T (b*k)      S <- S~ + k r^T      o = scale S^T q

All in float32 on the vector unit, no operand is rounded. S is [K, V], so exp g, b*k, k and q act
along its rows: they are transposed once for all heads of a sequence and spread over the lanes.
A state of K V 4 bytes takes longer to move than to work on: at 819 GB/s, 160 ns a head of
128 x 128 both ways, against about 130 ns of transposing and spreading.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from atomic_kernels.gdn2.tpu_layout import SUBLANES

# States of a grid step: enough to hide a step's fixed cost, and twice in and twice out they still
# leave three quarters of the 16 MiB of vector memory that a kernel gets by default.
MOST_STATE_BYTES = 2**20
COLUMNS = 4  # exp g, b*k, k, q


def step_body(scale: float, state_ref, q_ref, k_ref, v_ref, g_ref, b_ref, w_ref, o_ref, new_ref):
    """A block of sequences: states [n, Hv, K, V], q, k, g, b [n, H, K], v, w, o [n, Hv, V]."""
    sequences, value_heads = state_ref.shape[:2]
    heads = q_ref.shape[1]

    @pl.loop(0, sequences)
    def _(n):
        q, k, v, g, b, w = (
            x[n].astype(jnp.float32) for x in (q_ref, k_ref, v_ref, g_ref, b_ref, w_ref)
        )
        columns = transposed([jnp.exp(g), b * k, k, q * scale])  # [K, 4 H ..]
        outputs = []
        for value_head in range(value_heads):
            head = value_head // (value_heads // heads)
            decay, erase, key, query = (
                columns[:, i * heads + head : i * heads + head + 1] for i in range(COLUMNS)
            )  # [K, 1]
            row = slice(value_head, value_head + 1)
            state = state_ref[n, value_head]
            o, new = one_token(state, decay, erase, key, query, w[row] * v[row])
            outputs.append(o)
            new_ref[n, value_head] = new
        o_ref[n] = jnp.concatenate(outputs, 0).astype(o_ref.dtype)


def transposed(rows: list[Array]) -> Array:
    """[H, K] each -> [K, 4 H], padded to whole registers."""
    stacked = jnp.concatenate(rows, 0)
    missing = -stacked.shape[0] % SUBLANES
    if missing:
        padding = jnp.zeros((missing, stacked.shape[1]), jnp.float32)
        stacked = jnp.concatenate([stacked, padding], 0)
    return jnp.transpose(stacked)


def one_token(
    state: Array, decay: Array, erase: Array, key: Array, query: Array, written: Array
) -> tuple[Array, Array]:
    """o [1, V] and the new state [K, V]; decay, erase, key, query [K, 1]; written w*v [1, V]."""
    state = state * decay
    residual = written - jnp.sum(state * erase, 0, keepdims=True)  # [1, V]
    state = state + key * residual
    return jnp.sum(state * query, 0, keepdims=True), state


def gdn2_step_tpu(
    state: Array, q: Array, k: Array, v: Array, g: Array, b: Array, w: Array, *,
    scale: float, interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:  # fmt: skip
    """o [B, Hv, V] in v's dtype and the new state, in the old one's memory where jit allows.

    state [B, Hv, K, V] float32; q, k, g, b [B, H, K]; v, w [B, Hv, V]; see `api.gdn2_step`.
    """
    batch = state.shape[0]
    most = max(1, MOST_STATE_BYTES // (state.nbytes // batch))
    count = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= most)

    def spec(x: Array) -> pl.BlockSpec:
        rank = x.ndim
        return pl.BlockSpec((count, *x.shape[1:]), lambda n: (n, *[0] * (rank - 1)))

    arrays = (state, q, k, v, g, b, w)
    return pl.pallas_call(
        functools.partial(step_body, scale),
        grid=(batch // count,),
        in_specs=[spec(x) for x in arrays],
        out_specs=[spec(v), spec(state)],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="gdn2_step",
        interpret=interpret,
    )(*arrays)
