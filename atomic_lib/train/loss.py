# SPDX-License-Identifier: Apache-2.0
"""Next-token cross-entropy straight from the last hidden states, without all the logits at once.

For hidden h [B, T, D], output embedding E [V, D] and targets y [B, T]:

    z = h E^T            logits, kept for one chunk of T at a time (h's dtype)
    l = logsumexp(z) - z_y                            float32, nats a token
    loss = sum(c l) / (B T)      c: the targets' weights, 1 unless given
    dz = c (softmax(z) - onehot(y)) / (B T)
    dh = dz E,  dE = sum over chunks of dz^T h        (dE in float32)

The backward needs only dz, and dz needs only what the forward has in hand, so both gradients are
made in the forward sweep: three matrix products in all, no logits saved and none recomputed. The
backward pass then multiplies them by the incoming scalar. Chunks cut T, so that a batch split over
devices stays split.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def _sum_dtype(hidden: Array) -> jnp.dtype:
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _chunked(array: Array, chunks: int) -> Array:
    batch, length = array.shape[:2]
    if length % chunks:
        raise ValueError(
            f"loss_chunks: {chunks} does not divide the sequence length {length}; choose a divisor"
        )
    split = array.reshape(batch, chunks, length // chunks, *array.shape[2:])
    return jnp.moveaxis(split, 1, 0)  # [chunks, B, T / chunks, ...]


def _chunk_losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Losses [B, t] and logsumexp [B, t] in nats; `logits` [B, t, V] in the sum's dtype."""
    log_total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_total - picked, log_total


def token_losses(hidden: Array, embedding: Array, targets: Array, *, chunks: int = 1) -> Array:
    """Cross-entropy of every target, in nats, for evaluation (logits in float32).

    hidden [B, T, D] of any float dtype; embedding [V, D] (cast to it); targets [B, T] integers in
    [0, V). Returns [B, T] float32 (float64 for float64 input). Raises ValueError if `chunks` does
    not divide T.
    """
    dtype = _sum_dtype(hidden)
    matrix = embedding.astype(hidden.dtype)

    def one_chunk(_, chunk):
        chunk_hidden, chunk_targets = chunk
        # [B, t, D] x [V, D] -> [B, t, V]
        logits = jnp.einsum("btd,vd->btv", chunk_hidden, matrix, preferred_element_type=dtype)
        return None, _chunk_losses(logits, chunk_targets)[0]

    _, losses = jax.lax.scan(one_chunk, None, (_chunked(hidden, chunks), _chunked(targets, chunks)))
    return jnp.moveaxis(losses, 0, 1).reshape(targets.shape)


def cross_entropy(
    hidden: Array,
    embedding: Array,
    targets: Array,
    *,
    weights: Array | None = None,
    chunks: int = 1,
) -> Array:
    """Mean over B T of each target's weight times its cross-entropy in nats.

    Shapes and errors as in `token_losses`; weights [B, T] float32, or None for 1 everywhere.
    Differentiable in `hidden` and `embedding`. The logits have hidden's dtype (sums are float32),
    so with bfloat16 hidden states they are rounded to bfloat16. Returns a scalar, float32 (float64
    for float64 input).
    """
    return _cross_entropy(hidden, embedding, targets, weights, chunks)


def _weighted_sum(losses: Array, weights: Array | None) -> Array:
    return jnp.sum(losses if weights is None else losses * weights)


def _chunked_targets(hidden: Array, targets: Array, weights: Array | None, chunks: int) -> tuple:
    weights = None if weights is None else _chunked(weights, chunks)
    return _chunked(hidden, chunks), _chunked(targets, chunks), weights


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(
    hidden: Array, embedding: Array, targets: Array, weights: Array | None, chunks: int
) -> Array:
    dtype = _sum_dtype(hidden)
    matrix = embedding.astype(hidden.dtype)

    def one_chunk(total, chunk):
        chunk_hidden, chunk_targets, chunk_weights = chunk
        logits = jnp.einsum("btd,vd->btv", chunk_hidden, matrix).astype(dtype)
        losses, _ = _chunk_losses(logits, chunk_targets)
        return total + _weighted_sum(losses, chunk_weights), None

    total, _ = jax.lax.scan(
        one_chunk, jnp.zeros((), dtype), _chunked_targets(hidden, targets, weights, chunks)
    )
    return total / targets.size


def _chunk_gradients(
    hidden: Array, targets: Array, weights: Array | None, matrix: Array, scale: float
) -> tuple[Array, Array, Array]:
    """One chunk's summed loss, dh [B, t, D] in hidden's dtype and dE [V, D] in the sum's dtype."""
    dtype = _sum_dtype(hidden)
    logits = jnp.einsum("btd,vd->btv", hidden, matrix).astype(dtype)
    losses, log_total = _chunk_losses(logits, targets)
    is_target = jnp.arange(matrix.shape[0]) == targets[..., None]  # [B, t, V]
    d_logits = (jnp.exp(logits - log_total[..., None]) - is_target) * scale
    if weights is not None:
        d_logits = d_logits * weights[..., None]
    d_logits = d_logits.astype(hidden.dtype)
    d_hidden = jnp.einsum("btv,vd->btd", d_logits, matrix)
    d_matrix = jnp.einsum("btv,btd->vd", d_logits, hidden, preferred_element_type=dtype)
    return _weighted_sum(losses, weights), d_hidden, d_matrix


def _cross_entropy_forward(hidden, embedding, targets, weights, chunks):
    dtype = _sum_dtype(hidden)
    matrix = embedding.astype(hidden.dtype)
    scale = 1.0 / targets.size

    def one_chunk(carry, chunk):
        total, d_matrix = carry
        part, part_targets, part_weights = chunk
        loss, d_hidden, chunk_d_matrix = _chunk_gradients(
            part, part_targets, part_weights, matrix, scale
        )
        return (total + loss, d_matrix + chunk_d_matrix), d_hidden

    if chunks == 1:  # no loop: the embedding gradient is written once instead of read and rewritten
        total, d_hidden, d_matrix = _chunk_gradients(hidden, targets, weights, matrix, scale)
    else:
        start = (jnp.zeros((), dtype), jnp.zeros(embedding.shape, dtype))
        (total, d_matrix), d_chunks = jax.lax.scan(
            one_chunk, start, _chunked_targets(hidden, targets, weights, chunks)
        )
        d_hidden = jnp.moveaxis(d_chunks, 0, 1).reshape(hidden.shape)
    return total * scale, (d_hidden, d_matrix.astype(embedding.dtype))


def _cross_entropy_backward(chunks, gradients, d_loss):
    d_hidden, d_embedding = gradients
    return d_hidden * d_loss.astype(d_hidden.dtype), d_embedding * d_loss, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
