# SPDX-License-Identifier: Apache-2.0
"""Protects packing with document boundaries: every document as if it were alone in its row.

Oracle: the same model built without a separator, given each document at the start of a row of its
own; causality makes what follows it there invisible. It shares none of the code that finds
boundaries, restarts states, cuts convolutions or masks attention. Limit: float32 sums in another
order, at other positions of chunk and rotary angle, through one block. The loss of a whole step is
judged by numpy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_runs import make_config

from atomic_lib.config import TrainConfig
from atomic_lib.data import targets_inside_documents
from atomic_lib.train.loss import token_losses
from atomic_lib.train.optimizer import Optimizer
from atomic_lib.train.program import build_program, model_forward
from atomic_lib.train.sharding import Placement
from atomic_lib.train.step import TrainStep, make_eval_step

SEPARATOR, VOCABULARY, LENGTH = 3, 61, 96
# Tokens of each document, its separator included: one longer than a chunk of 64, some shorter than
# the four taps of a convolution, one that is nothing but its separator.
DOCUMENTS = (2, 70, 1, 5, 3, 16)
LIMIT = 2e-5  # nats
BLOCKS = {
    "baseline": ("atomic-baseline-smoke", {}),
    "hybrid": ("atomic-hybrid-smoke", {}),
    "berlm": (
        "berlm-hyb16-smoke",
        {"block": ["gdn2_conv", "attention", "window_attention"], "window_size": 24},
    ),
}


def config_of(preset: str, changes: dict, separator: int | None) -> TrainConfig:
    return TrainConfig(
        run="packed", preset=preset, compute_dtype="float32", document_separator=separator,
        # A tenth of the chunked form's compile time; kernel tests compare the two on segments.
        kernel_backend="reference", sequence_length=LENGTH, batch_size=1,
        schedule_unit="steps", max_steps=1,
        model={"vocab_size": VOCABULARY, "hidden_size": 64, "num_blocks": 1, **changes},
    )  # fmt: skip


def losses_of(config: TrainConfig, params, tokens: np.ndarray) -> np.ndarray:
    """Nats of every target, [B, T]."""

    @jax.jit
    def run(params, tokens):
        hidden, embedding, _ = model_forward(config)(params, tokens[:, :-1], None)
        return token_losses(hidden, embedding, tokens[:, 1:])

    return np.asarray(run(params, tokens))


def lively_parameters(config: TrainConfig):
    """Parameters of trained sizes; no scale is 1, no query and no bias is 0."""
    rng = np.random.default_rng(1)
    draw = {
        1: lambda shape: 0.5 + 0.2 * rng.normal(size=shape),
        2: lambda shape: rng.normal(size=shape) / (1 if VOCABULARY in shape else shape[0] ** 0.5),
    }
    shapes = config.model_config.parameter_shapes
    return {n: jnp.asarray(draw[len(shape)](shape), jnp.float32) for n, shape in shapes.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_packed_document_has_the_losses_of_the_document_alone(name):
    preset, changes = BLOCKS[name]
    config = config_of(preset, changes, SEPARATOR)
    rng = np.random.default_rng(0)
    ordinary = np.delete(np.arange(VOCABULARY), SEPARATOR)
    alone = rng.choice(ordinary, size=(len(DOCUMENTS), LENGTH + 1)).astype(np.int32)
    for row, length in enumerate(DOCUMENTS):
        alone[row, length - 1] = SEPARATOR
    documents = [row[:length] for row, length in zip(alone, DOCUMENTS, strict=True)]
    packed = np.concatenate(documents)[None]
    assert packed.shape == (1, LENGTH + 1)

    params = lively_parameters(config)
    found = losses_of(config, params, packed)[0]
    without = dataclasses.replace(config, document_separator=None)
    *apart, mixed = losses_of(without, params, np.concatenate([alone, packed]))
    wanted = np.concatenate(
        [[np.nan, *row[: n - 1]] for row, n in zip(apart, DOCUMENTS, strict=True)]
    )
    inside = targets_inside_documents(packed, SEPARATOR)[0]
    assert np.isnan(wanted[1:]).tolist() == (~inside).tolist()  # only first tokens are left out
    np.testing.assert_allclose(found[inside], wanted[1:][inside], rtol=0, atol=LIMIT)
    # Not so without boundaries, else this test would prove nothing.
    assert np.abs(mixed - wanted[1:])[inside].max() > 0.1


def numpy_losses(params, tokens: np.ndarray) -> np.ndarray:
    """Losses of `tiny`'s model without dropout, float64 [B, T]."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x = p["embedding/table"][tokens[:, :-1]]
    y = np.tanh(x @ p["block_0/ffn/up/kernel"]) @ p["block_0/ffn/down/kernel"]
    logits = (x + y) * p["final_norm/scale"] @ p["embedding/table"].T
    picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_the_step_and_the_evaluation_average_over_targets_inside_documents(accumulate_steps):
    placement = Placement.over(data_parallel=1, fsdp=1)
    optimizer = Optimizer(kind="adamw", weight_decay=0.0, clip_norm=1.0, placement=placement)
    step = TrainStep(
        forward=tiny.tiny_forward, optimizer=optimizer, placement=placement,
        accumulate_steps=accumulate_steps, document_separator=SEPARATOR,
    )  # fmt: skip
    tokens = tiny.tiny_tokens(batch=8)
    tokens[:2, ::2] = SEPARATOR  # the slices hold different numbers of documents
    params = tiny.tiny_params()
    loss, gradients, _ = jax.jit(step.loss_and_gradients)(params, tokens, jnp.int32(0))
    inside = tokens[:, :-1] != SEPARATOR
    losses = numpy_losses(params, tokens)
    wanted = losses[inside].mean()
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)

    # The gradient is that of this mean: a step of 1e-3 along it changes the loss accordingly.
    size = 1e-3
    moved = {name: value - size * gradients[name] for name, value in params.items()}
    fall = wanted - numpy_losses(moved, tokens)[inside].mean()
    squared = sum(float(jnp.sum(g**2)) for g in gradients.values())
    np.testing.assert_allclose(fall, size * squared, rtol=0.02)

    token_bytes = np.arange(tiny.VOCABULARY, dtype=np.int32)
    evaluate = make_eval_step(tiny.tiny_forward, placement, tiny.LENGTH, SEPARATOR)
    sums = evaluate(params, tokens, token_bytes)
    targets = tokens[:, 1:]
    with_bytes = inside & (targets > 0)
    np.testing.assert_allclose(sums["nats"], losses[inside].sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["exact_nats"], losses[with_bytes].sum(), rtol=1e-6)
    assert sums["position_targets"].tolist() == inside.sum(0).tolist()
    wanted = np.where(inside, losses, 0.0).sum(0)
    np.testing.assert_allclose(sums["position_nats"], wanted, rtol=1e-6)
    assert int(sums["bytes"]) == targets[with_bytes].sum()


def test_the_separator_of_a_config_reaches_the_step_and_the_evaluation(tiny_model):
    config = make_config(
        document_separator=5, dropout_rate=0.0, optimizer="adamw", compute_dtype="float32"
    )
    program = build_program(config)
    tokens = tiny.tiny_tokens(batch=4)
    tokens[:, 6] = 5
    state = program.start()
    inside = tokens[:, :-1] != 5
    wanted = numpy_losses(state.params, tokens)[inside].mean()
    sums = program.evaluate(state.params, tokens, np.zeros(tiny.VOCABULARY, np.int32))
    targets = int(sums["position_targets"].sum())
    assert targets == inside.sum() < inside.size
    np.testing.assert_allclose(float(sums["nats"]) / targets, wanted, rtol=1e-6)
    _, metrics = program.step(state, tokens, jnp.float32(0.0))
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)
