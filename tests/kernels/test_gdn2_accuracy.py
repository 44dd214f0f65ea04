# SPDX-License-Identifier: Apache-2.0
"""Protects the accuracy of outputs, state and every gradient on hard inputs.

Oracle: the recurrence token by token in float64 with JAX's autodiff; it shares no code with the
chunked form. The oracle itself is checked against finite differences and against a NumPy loop
written here. Limits: 2e-5 in float32 (worst of kernels/accuracy.md 1.0e-5), 6e-3 to 1.2e-2 with
bfloat16 operands (rounding is 2^-9 = 2e-3), 1e-4 with three passes.
All shapes on demand: python -m atomic_kernels.accuracy --scope full.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels import accuracy, hard_inputs
from atomic_kernels.hard_inputs import Shape
from gdn2_cases import assert_close, run, small_inputs

QUICK = accuracy.cases_of("quick")


@pytest.mark.parametrize("number", range(len(QUICK)), ids=lambda n: str(QUICK[n]))
def test_hard_inputs_stay_within_the_limits(number):
    """Every decay, kind of keys, b and segments, shared out among the shapes."""
    case = QUICK[number]
    contents = hard_inputs.all_contents()[number :: len(QUICK)]
    worst = accuracy.measure(case, contents)
    limits = accuracy.LIMITS["bf16" if case.dtype == "bfloat16" else "f32"]
    failures = [x for x in worst if not x.error <= limits[x.name]]
    assert not failures, f"{case}: {failures}"


def test_three_passes_stay_within_their_limit():
    case = accuracy.Case(
        shape=Shape(length=80, key_size=64, value_size=32), dtype="float32", chunk_size=64
    )
    worst = accuracy.measure(case, hard_inputs.all_contents()[::3], precision="bf16x3")
    failures = [x for x in worst if not 1e-8 < x.error <= accuracy.LIMITS["bf16x3"][x.name]]
    assert not failures, failures


def recurrence_in_numpy(arrays):
    """The four equations, one token, head and batch element after another, in float64."""
    q, k, v, g, b, w, states = (np.asarray(arrays[n], np.float64) for n in arrays)
    o, states = np.zeros_like(v), states.copy()
    for i in range(v.shape[0]):
        for h in range(v.shape[2]):
            key_head = h // (v.shape[2] // q.shape[2])
            for t in range(v.shape[1]):
                at = (i, t, key_head)
                decayed = np.diag(np.exp(g[at])) @ states[i, h]
                written = w[i, t, h] * v[i, t, h] - decayed.T @ (b[at] * k[at])
                states[i, h] = decayed + np.outer(k[at], written)
                o[i, t, h] = q.shape[-1] ** -0.5 * states[i, h].T @ q[at]
    return o, states


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_equals_the_recurrence_written_in_numpy(backend):
    arrays = small_inputs(length=20, batch=2, heads=2, value_heads=4, key_size=16, value_size=24)
    o, state = run(arrays, backend=backend)
    want_o, want_state = recurrence_in_numpy(arrays)
    assert o.dtype == state.dtype == jnp.float32
    assert_close("o", o, want_o, limit=2e-6)
    assert_close("state", state, want_state, limit=2e-6)


def test_the_oracle_gradient_equals_finite_differences():
    shape = Shape(length=5, key_size=3, value_size=2)
    contents = (hard_inputs.Content(decay="mild", keys="random", erase_bound=2.0, segments="one"),)
    inputs, ids = hard_inputs.make_inputs(shape, contents, np.float32)
    cotangents = hard_inputs.make_cotangents(shape, 1, np.float32)
    gradients = hard_inputs.oracle(inputs, ids, cotangents, elements_at_once=1)
    step = 1e-5

    def loss(changed):
        o, state = recurrence_in_numpy(changed)
        return (o * cotangents[0]).sum() + (state * cotangents[1]).sum()

    exact = {name: inputs[name].astype(np.float64) for name in hard_inputs.INPUT_NAMES}
    for name, gradient in zip(hard_inputs.INPUT_NAMES, hard_inputs.GRADIENT_NAMES, strict=True):
        numeric = np.zeros_like(exact[name])
        for place in np.ndindex(*numeric.shape):
            for sign in (1, -1):
                changed = {key: x.copy() for key, x in exact.items()}
                changed[name][place] += sign * step
                numeric[place] += sign * loss(changed) / (2 * step)
        assert_close(gradient, gradients[gradient], numeric, limit=1e-8)
