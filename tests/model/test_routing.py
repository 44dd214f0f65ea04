# SPDX-License-Identifier: Apache-2.0
"""Depth routing against its formula.

Protected: which changes each site reads, the read itself, and every gradient of the written-out
backward passes. The oracle restates the formula in float64: the sources of a site are stacked, the
softmax is taken over them, and gradients come from automatic differentiation of that
formula; a whole model is restated in numpy. It shares no code with the package, which works source
by source with products formed early. Limits are float32 rounding: the worst gradient measured is
off by 1.1e-6 of the largest (queries at 0), and the error grows with the scores, since a score of
size s is known to s * 6e-8 only and a share of the softmax carries that as a relative error.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    FLOAT32,
    as_float64,
    assert_close,
    lively_parameters,
    random_tokens,
    small_config,
)

from atomic_lib.model import bind_parameters, model_graph
from atomic_lib.model.depth import Source, plan_depth
from atomic_lib.model.routing import DepthLedger, block_summary, read_sources, source_scores

EPSILON = 1e-6
LIMIT = 3e-6  # for queries of size 1 or less
BLOCKS, SLOTS, SIZE = 3, 2, 16


def formula_read(query, key_scale, sources):
    """r of one site: sources [n, ..., D] -> [..., D], in the operands' dtype."""
    normed = sources / jnp.sqrt(jnp.mean(sources**2, axis=-1, keepdims=True) + EPSILON)
    scores = jnp.sum(query * key_scale * normed, axis=-1)
    shares = jax.nn.softmax(scores, axis=0)
    return jnp.sum(shares[..., None] * sources, axis=0)


def formula_stack(parameters, x):
    """Three blocks of two sublayers f(h) = tanh(h W) under the hierarchical formula."""
    summaries = []
    for block in range(BLOCKS):
        deltas = []
        for slot in range(SLOTS):
            sources = [*summaries, *deltas]
            r = 0.0
            if sources:
                r = formula_read(*parameters["routes"][block, slot], jnp.stack(sources))
            y = jnp.tanh((x + r) @ parameters["weights"][block, slot])
            x = x + y
            deltas.append(y)
        summaries.append(sum(deltas))
    return x


def package_stack(parameters, x):
    """The same stack with the package's ledger."""
    plan = plan_depth("hierarchical", num_blocks=BLOCKS, slots=SLOTS)
    weights = {site: query * scale for site, (query, scale) in parameters["routes"].items()}
    ledger = DepthLedger(plan, weights, epsilon=EPSILON)
    for block in range(BLOCKS):
        deltas = []
        for slot in range(SLOTS):
            read = ledger.read((block, slot))
            y = jnp.tanh((x if read is None else x + read) @ parameters["weights"][block, slot])
            x = x + y
            ledger.add(Source(block, slot), y, other_uses=0)
            deltas.append(y)
        ledger.add(Source(block), block_summary(deltas), other_uses=0)
    return x


@functools.cache
def value_and_pullback(stack):
    """(parameters, x, cotangent) -> (output, gradients of both), compiled."""

    def run(parameters, x, cotangent):
        output, pull = jax.vjp(stack, parameters, x)
        return output, pull(cotangent)

    # The limit is that of fused multiply-adds, which the tests' usual level 0 does not make.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 3})


def stack_parameters(query_size):
    rng = np.random.default_rng(3)
    sites = [(b, s) for b in range(BLOCKS) for s in range(SLOTS)]
    return {
        "routes": {
            site: (query_size * rng.normal(size=SIZE), 1 + 0.3 * rng.normal(size=SIZE))
            for site in sites[1:]
        },
        "weights": {site: rng.normal(size=(SIZE, SIZE)) / SIZE**0.5 for site in sites},
    }


@pytest.mark.parametrize("query_size", [0.0, 1.0, 10.0])
def test_output_and_every_gradient_equal_the_float64_formula(query_size):
    parameters = stack_parameters(query_size)
    rng = np.random.default_rng(4)
    x, cotangent = rng.normal(size=(2, 2, 5, SIZE))
    with jax.enable_x64(True):
        wanted, wanted_gradients = jax.tree.map(
            np.asarray, value_and_pullback(formula_stack)(parameters, x, cotangent)
        )
    assert wanted.dtype == np.float64
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (parameters, x, cotangent))
    found, gradients = value_and_pullback(package_stack)(*single)
    assert found.dtype == jnp.float32
    limit = LIMIT * max(1.0, query_size)
    assert_close("output", found, wanted, limit=limit)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert len(leaves) == 1 + BLOCKS * SLOTS + 2 * (BLOCKS * SLOTS - 1)
    for (path, gradient), exact in zip(leaves, jax.tree.leaves(wanted_gradients), strict=True):
        assert_close(jax.tree_util.keystr(path), gradient, exact, limit=limit)


@pytest.mark.parametrize("count", [1, 7])
def test_a_zero_query_reads_the_mean(count):
    values = tuple(jax.random.normal(jax.random.key(i), (1, 3, SIZE)) for i in range(count))
    weights = jnp.zeros((1, SIZE))
    scores = tuple(source_scores(value, weights, EPSILON)[0] for value in values)
    assert_close("r", read_sources(scores, values), np.mean(np.stack(values), 0), limit=1e-6)


def test_bfloat16_sources_keep_float32_scores_and_their_own_dtype():
    value = jax.random.normal(jax.random.key(0), (2, 5, SIZE), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (3, SIZE))
    scores = source_scores(value, weights, EPSILON)
    assert scores.dtype == jnp.float32
    assert scores.shape == (3, 2, 5)
    exact, w = np.asarray(value, np.float64), np.asarray(weights.astype(jnp.bfloat16), np.float64)
    normed = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + EPSILON)
    # The rounding of the weights to bfloat16 is in the oracle; the rest is float32.
    assert_close("scores", scores, np.einsum("btd,nd->nbt", normed, w), limit=LIMIT)
    read, pull = jax.vjp(read_sources, (scores[0], scores[1]), (value, 2 * value))
    assert read.dtype == jnp.bfloat16
    d_scores, d_values = pull(read)
    assert {d.dtype for d in d_scores} == {jnp.dtype("float32")}
    assert {d.dtype for d in d_values} == {jnp.dtype("bfloat16")}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_norm(params, path, x, family):
    if family == "L":
        x = x - x.mean(-1, keepdims=True)
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * params[f"{path}/scale"]
    return normed + params[f"{path}/bias"] if family == "L" else normed


def numpy_sublayer(config, params, path, x):
    """A sublayer on rows of one token, where a softmax over keys is 1."""
    kernel = lambda name: params[f"{path}/{name}/kernel"]  # noqa: E731
    if config.mixer_of(path.rsplit("/")[-1]) is None:
        gate = x @ kernel("gate")
        return (gate * sigmoid(gate) * (x @ kernel("up"))) @ kernel("down")
    if f"{path}/kv_up/kernel" in params:
        values = kernel("kv_up").reshape(config.mla_latent_dim, config.attention_heads, -1)
        values = values[..., config.mla_content_dim :].reshape(config.mla_latent_dim, -1)
        return x @ kernel("kv_down") @ values @ kernel("o")
    return (x @ kernel("v") * sigmoid(x @ kernel("gate"))) @ kernel("o")


def numpy_read(query, key_scale, sources):
    sources = np.stack(sources)
    normed = sources / np.sqrt(np.mean(sources**2, axis=-1, keepdims=True) + EPSILON)
    scores = normed @ (query * key_scale)
    shares = np.exp(scores - scores.max(0))
    shares /= shares.sum(0)
    return (shares[..., None] * sources).sum(0)


def numpy_model(config, params, tokens):
    """The final hidden vectors of rows of one token, [B, D], in float64."""
    family = config.norm_family
    x = params["embedding/table"][tokens]
    if family == "R":
        x = numpy_norm(params, "embedding_norm", x, family)
    summaries, flat = [], []
    for index in range(config.num_blocks):
        deltas, summed = [], []
        for name in config.sublayers:
            path, entry = f"block_{index}/{name}", x
            sources = {
                "hierarchical": [*summaries, *deltas],
                "block": summaries,
                "flat": flat,
                "none": [],
            }[config.routing]
            if sources:
                route = params[f"{path}_route/query"], params[f"{path}_route/key_scale"]
                read = numpy_read(*route, sources)
                entry = read if config.routing_read == "replacement" else x + read
            entry = numpy_norm(params, f"{path}_norm", entry, family)
            y = numpy_sublayer(config, params, path, entry)
            if family == "R":
                y = numpy_norm(params, f"{path}_post_norm", y, family)
            x = x + y
            deltas.append(y)
            flat.append(y)
            if config.routing_summary_ffn or name.startswith("mixer"):
                summed.append(y)
        summaries.append(sum(summed))
    return numpy_norm(params, "final_norm", x, family)


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": "hierarchical"},
        {"routing": "hierarchical", "routing_summary_ffn": False},
        {"routing": "hierarchical", "routing_read": "replacement", "norm_family": "P"},
        {"routing": "flat", "ffn_after": "mixer"},
        {"routing": "block", "norm_family": "R"},
        {"routing": "none"},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_the_model_routes_as_the_formula_says(changes):
    config = small_config("attention", "mla", **{"num_blocks": 3, **changes})
    params, tokens = lively_parameters(config), random_tokens(config, 5, 1)
    graph = model_graph(config, FLOAT32)
    hidden = jax.jit(lambda params, tokens: bind_parameters(graph, params)(tokens)[0])
    wanted = numpy_model(config, as_float64(params), np.asarray(tokens[:, 0]))
    # Nine sublayers in a row, each rounding to float32.
    assert_close("hidden", hidden(params, tokens)[:, 0], wanted, limit=2e-5)
