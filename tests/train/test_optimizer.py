# SPDX-License-Identifier: Apache-2.0
"""Protects the update rule and which parameter gets which rule.

Oracle of the update: the equations of `optimizer.py` written out in numpy, float64, one matrix at a
time with the quintic of Jordan et al. (coefficients from the Muon article), sharing nothing with
optax or with the stacking. Tolerance 1e-9 relative: five Newton-Schulz steps in float64, whose
coefficients magnify a rounding of 1e-16 by less than (3.45 + 4.78 + 2.04)^5 = 1.1e5 each way.
Oracle of the groups: the counts of the published models (seed 000), as numbers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atomic_lib.presets import get_preset
from atomic_lib.train.optimizer import Optimizer, describe_groups, is_hidden_matrix

SHAPES = {
    "block_0/ffn/down/kernel": (12, 5),
    "block_0/ffn/up/kernel": (5, 12),
    "block_0/mixer_0/k/kernel": (5, 5),
    "block_0/mixer_0/q/kernel": (5, 5),
    "block_0/mixer_0/q_conv/kernel": (4, 5),
    "block_0/mixer_0_norm/scale": (5,),
    "block_0/mixer_0_route/query": (5,),
    "embedding/table": (7, 5),
}
HIDDEN = {name for name in SHAPES if name.endswith("kernel") and "conv" not in name}
LIMIT = 1e-9
CONFIG = {"weight_decay": 0.1, "clip_norm": 1.0, "adam_b1": 0.9, "adam_b2": 0.95}
# One learning rate a step: warm-up, peak, decay.
RATES = (1e-3, 3e-3, 2e-3, 5e-4)


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: scale * rng.normal(size=shape) for name, shape in SHAPES.items()}


def newton_schulz(matrix):
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (np.linalg.norm(wide) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_direction(gradient, momentum, count):
    momentum = 0.95 * momentum + 0.05 * gradient
    ahead = 0.95 * momentum / (1 - 0.95 ** (count + 1)) + 0.05 * gradient / (1 - 0.95**count)
    return 0.2 * np.sqrt(max(gradient.shape)) * newton_schulz(ahead), momentum


def adam_direction(gradient, moments, count):
    first = 0.9 * moments[0] + 0.1 * gradient
    second = 0.95 * moments[1] + 0.05 * gradient**2
    step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.95**count)) + 1e-8)
    return step, (first, second)


def reference_steps(params, gradients_of_step, *, muon):
    """The parameters after every step, from the equations."""
    momentum = {name: 0.0 * value for name, value in params.items()}
    moments = {name: (0.0 * value, 0.0 * value) for name, value in params.items()}
    history = []
    for count, (gradients, rate) in enumerate(zip(gradients_of_step, RATES, strict=True), 1):
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        gradients = {name: g * min(1.0, 1.0 / norm) for name, g in gradients.items()}
        params = dict(params)
        for name, gradient in gradients.items():
            if muon and name in HIDDEN:
                step, momentum[name] = muon_direction(gradient, momentum[name], count)
            else:
                step, moments[name] = adam_direction(gradient, moments[name], count)
            decay = 0.1 if name in HIDDEN else 0.0
            params[name] = params[name] - rate * (step + decay * params[name])
        history.append(params)
    return history


@pytest.mark.parametrize("kind", ["muon_adamw", "adamw"])
def test_four_steps_match_the_equations_in_float64(kind):
    params = arrays(0)
    # The second gradient is far below the clip, the others above it.
    gradients_of_step = [arrays(1), arrays(2, 1e-3), arrays(3, 10.0), arrays(4)]
    wanted = reference_steps(params, gradients_of_step, muon=kind == "muon_adamw")
    with jax.enable_x64(True):
        optimizer = Optimizer(kind=kind, **CONFIG)
        found = {name: jnp.asarray(value) for name, value in params.items()}
        state = optimizer.init(found)

        @jax.jit
        def step(params, gradients, state, rate):
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
            return optimizer.update(params, gradients, state, rate, gradient_norm=norm)

        for number, (gradients, rate) in enumerate(zip(gradients_of_step, RATES, strict=True)):
            found, state = step(found, gradients, state, jnp.asarray(rate))
            for name, value in wanted[number].items():
                assert found[name].dtype == jnp.float64, name
                np.testing.assert_allclose(
                    found[name], value, rtol=LIMIT, atol=LIMIT, err_msg=f"{name}, step {number + 1}"
                )
        assert step._cache_size() == 1, "another learning rate must not compile again"


# What decays, by the groups that are asked for: by default no vector, no query, no tap, no table.
DECAYED = {
    ("muon",): HIDDEN,
    (): set(),
    ("muon", "embedding"): HIDDEN | {"embedding/table"},
    ("vectors", "adamw_matrices"): set(SHAPES) - HIDDEN - {"embedding/table"},
}


def test_a_zero_gradient_moves_only_what_decays():
    params = {name: jnp.asarray(value) for name, value in arrays(0).items()}
    gradients = {name: jnp.zeros_like(value) for name, value in params.items()}
    for groups, decayed in DECAYED.items():
        optimizer = Optimizer(kind="adamw", decay_groups=groups, **CONFIG)
        state = optimizer.init(params)
        updated, _ = jax.jit(optimizer.update)(
            params, gradients, state, jnp.asarray(1.0), gradient_norm=jnp.zeros(())
        )
        assert_decayed(params, updated, decayed)


def assert_decayed(params, updated, decayed):
    for name, value in params.items():
        kept = 0.9 if name in decayed else 1.0
        np.testing.assert_allclose(updated[name], kept * value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("preset", "hidden", "other"),
    [
        ("atomic-baseline", 282_591_232, 51_565_568),
        ("atomic-hybrid", 255_524_864, 51_606_528),
    ],
)
def test_groups_of_the_published_models(preset, hidden, other):
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in get_preset(preset).parameter_shapes.items()
    }
    rows = describe_groups(shapes, Optimizer(kind="muon_adamw", **CONFIG))
    assert [(row["group"], row["update"], row["weight_decay"]) for row in rows] == [
        ("muon", "Muon", 0.1),
        ("embedding", "AdamW", 0.0),
        ("vectors", "AdamW", 0.0),
    ]
    assert rows[0]["parameters"] == hidden
    assert sum(row["parameters"] for row in rows[1:]) == other
    assert not is_hidden_matrix("embedding/table")


def test_untied_and_convolved_models_keep_heads_and_taps_out_of_muon():
    shapes = get_preset("berlm-hyb16").parameter_shapes
    untied = dataclasses.replace(get_preset("berlm-hyb16"), tied_embedding=False).parameter_shapes
    head = set(untied) - set(shapes)
    taps = {name for name in shapes if "conv" in name}
    assert head
    assert taps
    assert not any(is_hidden_matrix(name) for name in head | taps)
