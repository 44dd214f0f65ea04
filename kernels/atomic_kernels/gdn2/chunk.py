# SPDX-License-Identifier: Apache-2.0
"""GDN-2 over one chunk of one head: the equations, forward and backward, one function each.

The recurrence, for a token (S [K, V] state, everything else a row of the arrays below):

    S~  = Diag(exp g) S              r = w*v - S~^T (b*k)
    S'  = S~ + k r^T                 o = scale S'^T q

Over C tokens, with gc_i = g_0 + .. + g_i (every exponent below is <= 0 when g <= 0):

    Akk_ij = sum_d (b*k)_id k_jd exp(gc_id - gc_jd)    i > j      A = (I + Akk)^-1
    Aqk_ij = sum_d    q_id  k_jd exp(gc_id - gc_jd)    i >= j     (q carries the scale)
    Qt = q exp(gc)   Kb = b*k exp(gc)   Kg = k exp(gc_last - gc)
    R = w*v - Kb S   Vn = A R   O = Qt S + Aqk Vn   S' = Diag(exp gc_last) S + Kg^T Vn

A goes from blocks of tokens to blocks twice as long, 1 and 2 being the earlier and later half:

    A11, A22 as they are    A21 = -A22 (Akk21 A11)    A12 = 0

never by powers of Akk, which reach 1e+9 for keys that point the same way, where A stays near 1;
and backwards, from dO and the gradient dS' of the state that leaves the chunk:

    dVn = Aqk^T dO + Kg dS'    dR = A^T dVn    dv = dR*w    dw = dR*v
    dAqk = dO Vn^T (i >= j)    dAkk = -dR Vn^T (i > j)     (no A^T dA A^T is needed)
    dQt = dO S^T    dKb = -dR S^T    dKg = Vn dS'^T
    dS = Diag(exp gc_last) dS' + Qt^T dO - Kb^T dR

Scores, Qt, Kb and Kg come from `levels`, and so does the way from their gradients to dq, d(b k),
dk and dg. Both backends call all of these functions, `xla_chunk` on batches of chunks and the TPU
kernels on what they hold in vector memory; their own is how a chunk lies there.

q, k, b, Qt, Kb, Kg [C, K]; v, w, R, Vn, O [C, V]; Aqk, A [C, C]; the state is kept as S^T [V, K].
Arrays are float32, or operands that were split before. Value heads that share a key head are
further columns of V: no equation mixes columns of V. What is sequential is only S from chunk to
chunk; the backward needs the inputs, S before the chunk, and A.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from atomic_kernels.gdn2.arithmetic import NN, NT, TN, Operand, Rounding, dot

Factor = Array | Operand


class Inputs(NamedTuple):
    """The inputs of one chunk, q times the scale, or their gradients."""

    q: Array  # [C, K]
    k: Array  # [C, K]
    v: Array  # [C, V]
    g: Array  # [C, K]
    b: Array  # [C, K]
    w: Array  # [C, V]


# Forward ----------------------------------------------------------------------------------------


def decay_factors(g: Array, starts: Array | None) -> Array:
    """exp(g) [C, K]; 0 where a segment starts [C, 1]: nothing before it is seen from there on."""
    decay = jnp.exp(g)
    return decay if starts is None else jnp.where(starts, 0.0, decay)


def diagonal(q: Array, k: Array) -> Array:
    """q_i k_i [C, 1]: the diagonal of Aqk, which no decay touches."""
    return jnp.sum(q * k, 1, keepdims=True)


def ladder_middle(erase_scores: Factor, earlier: Factor, rounding: Rounding) -> Array:
    """Akk21 A11 [.., N, N]."""
    return dot(rounding.fine(erase_scores), rounding.fine(earlier), NN)


def ladder_cross(later: Factor, middle: Factor, rounding: Rounding) -> Array:
    """A21 = -A22 (Akk21 A11) [.., N, N]."""
    return -dot(rounding.fine(later), rounding.fine(middle), NN)


def written(v: Array, w: Array, erase: Factor, state: Factor, rounding: Rounding) -> Array:
    """R = w*v - Kb S [C, V]."""
    return w * v - dot(rounding.coarse(erase), rounding.coarse(state), NT)


def new_values(inverse: Factor, written: Factor, rounding: Rounding) -> Array:
    """Vn = A R [C, V]: what each token adds to the state."""
    return dot(rounding.fine(inverse), rounding.fine(written), NN)


def read_state(query: Factor, state: Factor, rounding: Rounding) -> Array:
    """Qt S [C, V], the part of O from before the chunk."""
    return dot(rounding.coarse(query), rounding.coarse(state), NT)


def read_chunk(query_scores: Factor, new_values: Factor, rounding: Rounding) -> Array:
    """Aqk Vn [C, V], the part of O from inside it."""
    return dot(rounding.fine(query_scores), rounding.coarse(new_values), NN)


def next_state(
    state: Array, total: Array, new_values: Factor, key: Factor, rounding: Rounding
) -> Array:
    """S' [V, K]; total = exp(gc_last) [1, K]."""
    return state * total + dot(rounding.fine(new_values), rounding.fine(key), TN)


# Backward ---------------------------------------------------------------------------------------


def d_new_values(
    query_scores: Factor, d_o: Factor, key: Factor, d_state: Factor, rounding: Rounding
) -> Array:
    """dVn = Aqk^T dO + Kg dS' [C, V]."""
    return dot(rounding.fine(query_scores), rounding.coarse(d_o), TN) + dot(
        rounding.fine(key), rounding.fine(d_state), NT
    )


def d_written(inverse: Factor, d_new_values: Factor, rounding: Rounding) -> Array:
    """dR = A^T dVn [C, V]."""
    return dot(rounding.fine(inverse), rounding.fine(d_new_values), TN)


def d_values(v: Array, w: Array, d_written: Array) -> tuple[Array, Array]:
    """dv and dw [C, V]."""
    return d_written * w, d_written * v


def d_state_before(
    d_state: Array, total: Array, d_o: Factor, query: Factor, d_written: Factor, erase: Factor,
    rounding: Rounding,
) -> Array:  # fmt: skip
    """dS [V, K] from dS'."""
    coarse = rounding.coarse
    read = dot(coarse(d_o), coarse(query), TN)
    return d_state * total + read - dot(coarse(d_written), coarse(erase), TN)


def d_diagonal(d_o: Array, new_values: Array) -> Array:
    """dO_i Vn_i [C, 1], the diagonal of dAqk, in float32: it alone makes dq where decay is strong,
    and may be a small sum of large terms."""
    return jnp.sum(d_o * new_values, 1, keepdims=True)


def d_query_scores(d_o: Factor, new_values: Factor, rounding: Rounding) -> Array:
    """dO Vn^T [C, C], of which dAqk is the lower triangle."""
    return dot(rounding.coarse(d_o), rounding.fine(new_values), NT)


def d_erase_scores(d_written: Factor, new_values: Factor, rounding: Rounding) -> Array:
    """-dR Vn^T [C, C], of which dAkk is the strict lower triangle."""
    return -dot(rounding.fine(d_written), rounding.fine(new_values), NT)


class FactorGradients(NamedTuple):
    """dQt, dKb and dKg [C, K]."""

    query: Array
    erase: Array
    key: Array


def d_factors(
    d_o: Factor, d_written: Factor, new_values: Factor, state: Factor, d_state: Factor,
    rounding: Rounding,
) -> FactorGradients:  # fmt: skip
    """dQt = dO S^T, dKb = -dR S^T, dKg = Vn dS'^T."""
    coarse = rounding.coarse
    return FactorGradients(
        dot(coarse(d_o), coarse(state), NN),
        -dot(coarse(d_written), coarse(state), NN),
        dot(coarse(new_values), coarse(d_state), NN),
    )


def d_total_decay(state: Array, d_state: Array, total: Array) -> Array:
    """What every log decay of the chunk gets through Diag(exp gc_last) S [1, K]."""
    return jnp.sum(state * d_state, 0, keepdims=True) * total


def d_keys(
    inputs: tuple[Array, Array, Array], decay: Array, d_diagonal: Array,
    d_query: Array, d_erase: Array, d_key: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk and db [C, K] from q, k, b, from dx of q e and (b k) e, and from dk of the levels:

    dq = dx e + dAqk_ii k    d(b k) = dx e    dk = dk + d(b k) b + dAqk_ii q    db = d(b k) k
    """
    q, k, b = inputs
    d_erase_keys = d_erase * decay
    return (
        d_query * decay + d_diagonal * k,
        d_key + d_erase_keys * b + d_diagonal * q,
        d_erase_keys * k,
    )
