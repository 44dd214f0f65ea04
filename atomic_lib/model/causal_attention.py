# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention: the one place where an implementation is chosen by name.

    o_i = sum_j softmax_j(scale q_i . k_j) v_j   over   first_i <= j <= i

first_i is the start of the query's segment, or i - window + 1 if that is later. Scores and softmax
are float32; the weights are cast to the values' dtype before they are summed.

    chunked       any device: queries in chunks, keys cut at the diagonal (and at the window), each
                  chunk recomputed in the backward pass. No T x T tensor beyond one chunk's rows.
    dot_product   jax.nn.dot_product_attention; on a GPU it may choose a fused kernel. No segments.
    splash        a TPU, or a program compiled for one: see splash.py.
    auto          chunked.
"""

from functools import partial

import jax
import jax.numpy as jnp

from atomic_lib.model.splash import splash_attention

Array = jax.Array

# Rows of a chunk. On v5e, T = 2048, chunks of 256 / 512 / 1024 compile to 4.3 / 5.2 / 7.0 ms a
# layer (forward and backward, compiler's estimate), since smaller chunks waste less above the
# diagonal. At most 16 chunks keep the program, which is unrolled, small.
MIN_CHUNK_ROWS = 256
MAX_CHUNKS = 16


def _attend(q: Array, k: Array, v: Array, query_index: Array, first: Array, key_index: Array,
            scale: float) -> Array:  # fmt: skip
    """Attention of a few queries on given keys.

    q [B, T, H, K]; k [B, S, G, K], v [B, S, G, V], H a multiple of G; query_index, first [B or 1,
    T]; key_index [S]. Returns [B, T, H, V] in v's dtype.
    """
    batch, length, heads, _ = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, q.shape[-1])
    # [B, G, H/G, T, S]
    scores = jnp.einsum("btgnk,bsgk->bgnts", grouped, k, preferred_element_type=jnp.float32)
    # [B or 1, T, S]
    visible = (key_index <= query_index[..., None]) & (key_index >= first[..., None])
    scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgnts,bsgv->btgnv", weights, v).reshape(batch, length, heads, v.shape[-1])


def _first_index(query_index: Array, first_visible: Array | None, window: int | None) -> Array:
    """Index of the first key that each query sees, [B or 1, T]."""
    first = jnp.zeros_like(query_index) if first_visible is None else first_visible
    return first if window is None else jnp.maximum(first, query_index - (window - 1))


def _chunk_rows(length: int) -> int:
    return max(MIN_CHUNK_ROWS, -(-length // MAX_CHUNKS))


def _chunked(q: Array, k: Array, v: Array, *, scale: float, first_visible: Array | None,
             window: int | None) -> Array:  # fmt: skip
    length = q.shape[1]
    rows = _chunk_rows(length)
    attend = jax.checkpoint(_attend, static_argnums=6) if length > rows else _attend
    outputs = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        low = 0 if window is None else max(0, start - window + 1)
        index = jnp.arange(start, stop)[None]
        visible = None if first_visible is None else first_visible[:, start:stop]
        first = _first_index(index, visible, window)
        keys, values = k[:, low:stop], v[:, low:stop]
        outputs.append(
            attend(q[:, start:stop], keys, values, index, first, jnp.arange(low, stop), scale)
        )
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _dot_product(q: Array, k: Array, v: Array, *, scale: float, first_visible: Array | None,
                 window: int | None) -> Array:  # fmt: skip
    if first_visible is not None:
        raise NotImplementedError(
            "attention 'dot_product' does not take segment_ids; choose attention 'chunked'"
        )
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"attention 'dot_product' needs values as wide as keys, got {v.shape[-1]} and "
            f"{q.shape[-1]}; choose attention 'chunked'"
        )
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=local
    )


_IMPLEMENTATIONS = {
    "auto": _chunked,
    "chunked": _chunked,
    "dot_product": _dot_product,
    "splash": splash_attention,
}


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    first_visible: Array | None = None,
    window: int | None = None,
    implementation: str = "auto",
) -> Array:
    """Attention of a row of tokens on itself.

    q, k [B, T, H, K]; v [B, T, H, V]; first_visible [B, T] int32, the index of the first token that
    each token may see, or None for 0; window tokens including the query itself, or None. Returns
    [B, T, H, V] in v's dtype. Raises ValueError for an unknown implementation, NotImplementedError
    for one that cannot do what is asked; an implementation asked for by name is never replaced.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: {implementation!r} is not allowed; choose one of "
            f"{tuple(_IMPLEMENTATIONS)}"
        )
    return _run(
        q, k, v, first_visible, scale=scale, window=window, implementation=implementation
    )  # fmt: skip


# Jitted, so that layers of equal shapes share one trace and one lowering (and, in splash, a mask).
@partial(jax.jit, static_argnames=("scale", "window", "implementation"))
def _run(q, k, v, first_visible, *, scale, window, implementation):
    attend = _IMPLEMENTATIONS[implementation]
    with jax.named_scope("attention_kernel"):  # the name by which a compiled step is read
        return attend(q, k, v, scale=scale, first_visible=first_visible, window=window)


def cached_attention(
    q: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    positions: Array,
    first_visible: Array | None,
    window: int | None = None,
) -> Array:
    """Attention of new tokens on a cache that already holds them.

    q [B, T, H, K]; keys [B, S, G, K], values [B, S, G, V], slot j holds position j, H a multiple of
    G; positions, first_visible [B, T] int32. Returns [B, T, H, V] in the values' dtype.
    """
    first = _first_index(positions, first_visible, window)
    length = q.shape[1]
    rows = _chunk_rows(length)
    slots = jnp.arange(keys.shape[1])
    outputs = [
        _attend(q[:, a : a + rows], keys, values, positions[:, a : a + rows],
                first[:, a : a + rows], slots, scale)
        for a in range(0, length, rows)
    ]  # fmt: skip
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def write_cache(cache: Array, new: Array, positions: Array, valid: Array | None) -> Array:
    """Writes new [B, T, ...] into the slots `positions` [B, T] of cache [B, S, ...].

    Padding is not written, nor is what lies beyond the cache's last slot.
    """
    slots = positions if valid is None else jnp.where(valid, positions, cache.shape[1])
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, slots].set(new.astype(cache.dtype), mode="drop")
