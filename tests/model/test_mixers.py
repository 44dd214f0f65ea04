# SPDX-License-Identifier: Apache-2.0
"""Each mixer against its equations, token by token in float64 numpy.

Protected: which projection feeds which role (w and b are easily swapped), gates, norms, positions,
windows, head layout. The oracle shares only the parameters' names with the modules. Limit: float32
rounding through one mixer; worst measured 2e-6.
"""

import jax
import numpy as np
import pytest
from model_cases import (
    FLOAT32,
    as_float64,
    assert_close,
    lively_parameters,
    small_config,
)

from atomic_lib.model import bind_parameters, model_graph
from atomic_lib.model.context import make_context

BATCH, LENGTH, LIMIT = 2, 11, 2e-5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heads_of(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def rms(x, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def recurrence(q, k, v, g, b, w):
    """[B, T, H, K] each -> [B, T, H, V]."""
    state, outputs = np.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1])), []
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None] * state
        read = np.einsum("bhkv,bhk->bhv", state, b[:, t] * k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], w[:, t] * v[:, t] - read)
        outputs.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return np.stack(outputs, axis=1)


def gdn2(config, p, x):
    q, k, v, w, b, g = (heads_of(x @ p[f"{n}/kernel"], config.num_heads) for n in "qkvwbg")
    o = recurrence(unit(q), unit(k), v, -np.log1p(np.exp(g)), sigmoid(b), sigmoid(w))
    if config.gdn2_out_norm:
        o = rms(o, config.norm_epsilon) * p["out_norm/scale"].reshape(o.shape[2:])
    return o.reshape(*x.shape[:2], -1) @ p["o/kernel"]


def convolve(x, kernel):
    taps, out = kernel.shape[0], np.zeros_like(x)
    for back in range(taps):
        out[:, back:] += kernel[taps - 1 - back] * x[:, : x.shape[1] - back]
    return out * sigmoid(out)


def gdn2_conv(config, p, x):
    q, k, v = (
        heads_of(convolve(x @ p[f"{n}/kernel"], p[f"{n}_conv/kernel"]), config.num_heads)
        for n in "qkv"
    )
    b, w = (sigmoid(heads_of(x @ p[f"{n}/kernel"], config.num_heads)) for n in "bw")
    raw = x @ p["decay_down/kernel"] @ p["decay_up/kernel"] + p["dt_bias"]
    decay = -np.exp(p["A_log"])[:, None] * np.log1p(np.exp(heads_of(raw, config.num_heads)))
    gate = x @ p["gate_down/kernel"] @ p["gate_up/kernel"] + p["gate_up/bias"]
    o = rms(recurrence(unit(q), unit(k), v, decay, b, w), config.norm_epsilon)
    o = o * p["out_norm/scale"] * sigmoid(heads_of(gate, config.num_heads))
    return o.reshape(*x.shape[:2], -1) @ p["o/kernel"]


def rotated(x, theta):
    """Pairs (i, i + P/2) of x [B, T, H, P] as complex numbers, turned by t * theta^(-2i/P)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax_attention(q, k, v, window):
    scores = np.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    t, s = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])[None]
    scores = np.where((s <= t) & (s > t - window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshv->bthv", weights, v)


def attention(config, p, x):
    q, k, v = (heads_of(x @ p[f"{n}/kernel"], config.attention_heads) for n in "qkv")
    windowed = config.block[0] == "window_attention"
    if (config.window_positions if windowed else config.attention_positions) == "rope":
        q, k = rotated(q, config.rope_theta), rotated(k, config.rope_theta)
    o = softmax_attention(q, k, v, config.window_size if windowed else LENGTH)
    o = o.reshape(*x.shape[:2], -1)
    if config.attention_gate:
        o = o * sigmoid(x @ p["gate/kernel"])
    return o @ p["o/kernel"]


def mla(config, p, x):
    heads, content = config.attention_heads, config.mla_content_dim
    q = heads_of(x @ p["q/kernel"], heads)
    q = np.concatenate([q[..., :content], rotated(q[..., content:], config.rope_theta)], axis=-1)
    up = heads_of(x @ p["kv_down/kernel"] @ p["kv_up/kernel"], heads)
    shared = rotated((x @ p["k_rotary/kernel"])[:, :, None], config.rope_theta)
    k = np.concatenate([up[..., :content], np.repeat(shared, heads, axis=2)], axis=-1)
    o = softmax_attention(q, k, up[..., content:], LENGTH)
    return o.reshape(*x.shape[:2], -1) @ p["o/kernel"]


CASES = {
    "gdn2": (gdn2, {}),
    "gdn2-out-norm": (gdn2, {"gdn2_out_norm": True}),
    "gdn2_conv": (gdn2_conv, {}),
    "mla": (mla, {}),
    "attention-nope-gated": (attention, {}),
    "attention-rope": (attention, {"attention_positions": "rope", "attention_gate": False}),
    "window_attention-rope": (attention, {"window_size": 3}),
    "window_attention-nope": (attention, {"window_size": 1, "window_positions": "nope"}),
}


@pytest.mark.parametrize("case", CASES)
def test_mixer_equals_its_equations(case):
    oracle, changes = CASES[case]
    config = small_config(case.split("-")[0], num_blocks=1, **changes)
    params = lively_parameters(config)
    x = np.random.default_rng(5).normal(size=(BATCH, LENGTH, config.hidden_size))
    graph = model_graph(config, FLOAT32)

    @jax.jit
    def run(params, x):
        context = make_context((BATCH, LENGTH), segment_ids=None, placement=None, start=None)
        return bind_parameters(graph, params).block_0.mixer_0(x, context, None)[0]

    path = "block_0/mixer_0/"
    exact = {n.removeprefix(path): v for n, v in as_float64(params).items() if n.startswith(path)}
    found = run(params, x.astype(np.float32))
    assert_close("y", found, oracle(config, exact, x), limit=LIMIT)
