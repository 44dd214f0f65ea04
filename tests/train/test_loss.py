# SPDX-License-Identifier: Apache-2.0
"""Protects the chunked cross-entropy: value, both gradients, per-token losses.

Oracle: numpy in float64 with all logits at once, gradients written out from
d loss / d z = (softmax - onehot) / N; it shares no code with the chunked form. Limit: rounding a
logit z to a dtype moves exp(z) by |z| eps / 2 relatively, and the sum that made z costs about as
much again, so a result may differ by max|z| eps of the largest one. Evaluation sums bfloat16
products in float32, so float32's eps holds for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atomic_lib.train.loss import cross_entropy, token_losses

B, T, D, V = 3, 12, 8, 301
CASES = [  # dtype, scale of the hidden states (30 gives logits up to 300), chunks
    ("float64", 1.0, 1),
    ("float64", 30.0, 4),
    ("float32", 1.0, 4),
    ("float32", 30.0, 1),
    ("bfloat16", 1.0, 4),
]


def inputs(scale=1.0):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)) * scale
    embedding = rng.normal(size=(V, D))
    targets = rng.integers(0, V, size=(B, T))
    targets[0, 0], targets[0, 1] = 0, V - 1  # the ends of the vocabulary
    return hidden, embedding, targets.astype(np.int32)


def oracle(hidden, embedding, targets):
    """Losses [B, T], d mean / d hidden, d mean / d embedding, all float64."""
    logits = hidden @ embedding.T
    top = logits.max(-1, keepdims=True)
    log_total = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    losses = log_total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    d_logits = np.exp(logits - log_total[..., None])
    np.put_along_axis(
        d_logits,
        targets[..., None],
        np.take_along_axis(d_logits, targets[..., None], -1) - 1,
        -1,
    )
    d_logits /= targets.size
    return losses, d_logits @ embedding, np.einsum("btv,btd->vd", d_logits, hidden)


def assert_close(name, found, wanted, *, dtype, limit):
    assert found.shape == wanted.shape, name
    assert found.dtype == jnp.dtype(dtype), f"{name}: {found.dtype}"
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all(), name
    error = np.abs(found - wanted)
    worst = np.unravel_index(error.argmax(), error.shape)
    bound = limit * np.abs(wanted).max()
    assert error[worst] <= bound, f"{name}{list(worst)}: {found[worst]} against {wanted[worst]}"


@pytest.mark.parametrize(("dtype", "scale", "chunks"), CASES, ids=lambda value: str(value))
def test_losses_and_gradients_match_the_full_logits(dtype, scale, chunks):
    hidden, embedding, targets = inputs(scale)
    wide = "float64" if dtype == "float64" else "float32"

    def everything(h, e):
        loss_of = lambda h, e: cross_entropy(h, e, targets, chunks=chunks)  # noqa: E731
        return (
            jax.value_and_grad(loss_of, argnums=(0, 1))(h, e),
            loss_of(h, e),
            token_losses(h, e, targets, chunks=chunks),
        )

    with jax.enable_x64(dtype == "float64"):
        h, e = jnp.asarray(hidden, dtype), jnp.asarray(embedding, wide)
        (loss, gradients), forward_only, per_token = jax.jit(everything)(h, e)
        # The oracle sees the rounded inputs, so that only the computation is judged.
        h, e = np.asarray(h, np.float64), np.asarray(e.astype(dtype), np.float64)
    losses, d_hidden, d_embedding = oracle(h, e, targets)
    largest = np.abs(h @ e.T).max()
    limit = largest * float(jnp.finfo(dtype).eps)
    wide_limit = largest * float(jnp.finfo(wide).eps)
    assert_close("loss", loss, losses.mean(), dtype=wide, limit=limit)
    assert_close("d_hidden", gradients[0], d_hidden, dtype=dtype, limit=limit)
    assert_close("d_embedding", gradients[1], d_embedding, dtype=wide, limit=limit)
    assert_close("forward only", forward_only, losses.mean(), dtype=wide, limit=limit)
    assert_close("token_losses", per_token, losses, dtype=wide, limit=wide_limit)


@pytest.mark.parametrize("chunks", [1, 4])
def test_weights_count_each_target_as_often_as_they_say(chunks):
    hidden, embedding, targets = inputs()
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 3, size=(B, T)).astype(float)  # zeros among them
    with jax.enable_x64(True):
        loss_of = lambda h, e: cross_entropy(  # noqa: E731
            h, e, targets, weights=jnp.asarray(weights), chunks=chunks
        )
        both = jax.value_and_grad(loss_of, argnums=(0, 1))
        loss, (d_hidden, d_embedding) = both(jnp.asarray(hidden), jnp.asarray(embedding))
        alone = loss_of(jnp.asarray(hidden), jnp.asarray(embedding))
    losses, wanted_hidden, _ = oracle(hidden, embedding, targets)
    logits = hidden @ embedding.T
    d_logits = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    d_logits -= np.eye(V)[targets]
    d_logits *= weights[..., None] / targets.size
    assert_close("loss", loss, (weights * losses).mean(), dtype="float64", limit=1e-12)
    assert_close("forward only", alone, (weights * losses).mean(), dtype="float64", limit=1e-12)
    wanted_hidden = wanted_hidden * weights[..., None]
    assert_close("d_hidden", d_hidden, wanted_hidden, dtype="float64", limit=1e-12)
    wanted_embedding = np.einsum("btv,btd->vd", d_logits, hidden)
    assert_close("d_embedding", d_embedding, wanted_embedding, dtype="float64", limit=1e-12)


def test_gradient_scales_with_the_incoming_cotangent():
    hidden, embedding, targets = inputs()
    with jax.enable_x64(True):
        gradient = jax.grad(lambda h: 2.5 * cross_entropy(h, jnp.asarray(embedding), targets))
        _, d_hidden, _ = oracle(hidden, embedding, targets)
        found = gradient(jnp.asarray(hidden))
    assert_close("d_hidden", found, 2.5 * d_hidden, dtype="float64", limit=1e-12)


def test_logits_of_one_chunk_only_are_alive():
    """The compiled program's temporaries shrink with the chunks (here V is the large axis)."""
    shapes = (
        jax.ShapeDtypeStruct((2, 256, 8), jnp.float32),
        jax.ShapeDtypeStruct((4096, 8), jnp.float32),
    )
    targets = jnp.zeros((2, 256), jnp.int32)

    def temporaries(chunks):
        loss = jax.grad(lambda h, e: cross_entropy(h, e, targets, chunks=chunks), argnums=(0, 1))
        return jax.jit(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    all_logits = 2 * 256 * 4096 * 4
    assert temporaries(1) >= all_logits
    assert temporaries(16) < all_logits / 2


def test_chunks_that_do_not_divide_the_length_are_refused():
    hidden, embedding, targets = inputs()
    with pytest.raises(ValueError, match="loss_chunks: 5 does not divide the sequence length 12"):
        cross_entropy(jnp.asarray(hidden), jnp.asarray(embedding), targets, chunks=5)
