# SPDX-License-Identifier: Apache-2.0
"""GDN-2 token by token: the recurrence as it is written, and nothing else.

    S~ = Diag(exp g_t) S        r_t = w_t*v_t - S~^T (b_t*k_t)
    S  = S~ + k_t r_t^T         o_t = scale S^T q_t

It shares no code with the chunked backends and is the oracle for them. Sums are elementwise
products and reductions, so no matrix unit rounds an operand; the arithmetic is float64 when an
input is, else float32. Differentiable by JAX (which stores a state for each token).
"""

import jax
import jax.numpy as jnp
from jax import Array


def gdn2_reference(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    *,
    scale: float,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Array]:
    """q, k, g, b [B, T, H, K]; v, w [B, T, Hv, V]; initial_state [B, Hv, K, V]; segment_ids [B, T].

    Returns o [B, T, Hv, V] in v's dtype and the last state [B, Hv, K, V] in the arithmetic's.
    """
    batch, length, heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    dtype = jnp.promote_types(jnp.result_type(q, k, v, g, b, w), jnp.float32)
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, key_size, value_size), dtype)
    starts = jnp.zeros((length, batch), bool)
    if segment_ids is not None:
        starts = starts.at[1:].set((segment_ids[:, 1:] != segment_ids[:, :-1]).T)

    def by_token(x: Array, repeats: int) -> Array:
        return jnp.moveaxis(jnp.repeat(x, repeats, axis=2), 1, 0).astype(dtype)  # [T, B, Hv, .]

    repeats = value_heads // heads
    tokens = [by_token(x, repeats) for x in (q, k, g, b)] + [by_token(x, 1) for x in (v, w)]

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, g_t, b_t, v_t, w_t, start = token
        state = jnp.where(start[:, None, None, None], 0.0, state)  # [B, Hv, K, V]
        state = jnp.exp(g_t)[..., None] * state
        read = ((b_t * k_t)[..., None] * state).sum(-2)  # [B, Hv, V]
        state = state + k_t[..., None] * (w_t * v_t - read)[..., None, :]
        return state, scale * (q_t[..., None] * state).sum(-2)

    state, o = jax.lax.scan(step, initial_state.astype(dtype), (*tokens, starts))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state
