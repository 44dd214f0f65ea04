# SPDX-License-Identifier: Apache-2.0
"""Protects the public contract: errors that name the argument, dtypes, the choice of a backend,
the compat names, and that a backward keeps only inputs, chunk states and inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels import compat
from atomic_kernels.gdn2 import describe_backend, gdn2, gdn2_from_projections, gdn2_step
from atomic_kernels.gdn2 import xla as xla_backend
from gdn2_cases import assert_close, run, small_inputs

PER_TOKEN = ("q", "k", "v", "g", "b", "w")


def call(function=gdn2, change=None, **options):
    arrays = small_inputs(length=8, batch=2, heads=2, value_heads=4, value_size=24)
    arrays = {name: arrays[name] for name in PER_TOKEN}
    return function(*(arrays | (change or {})).values(), **options)


WRONG = {
    "g must be <= 0": dict(change={"g": np.full((2, 8, 2, 16), 0.1, np.float32)}),
    r"k must have q's shape \(2, 8, 2, 16\)": dict(change={"k": np.zeros((2, 8, 2, 17), "f4")}),
    r"w must have v's shape": dict(change={"w": np.zeros((2, 8, 4, 16), "f4")}),
    r"q must be \[B, T, H, K\], got shape \(8, 2, 16\)": dict(
        change={"q": np.zeros((8, 2, 16), "f4")}
    ),
    "v has 3 heads, which is no multiple of q's 2": dict(
        change={"v": np.zeros((2, 8, 3, 24), "f4"), "w": np.zeros((2, 8, 3, 24), "f4")}
    ),
    "v must have q's leading axes": dict(
        change={"v": np.zeros((2, 9, 4, 24), "f4"), "w": np.zeros((2, 9, 4, 24), "f4")}
    ),
    "b is float16": dict(change={"b": np.zeros((2, 8, 2, 16), np.float16)}),
    "q must be bfloat16 or float32, got int32": dict(change={"q": np.zeros((2, 8, 2, 16), "i4")}),
    "initial_state must be float32": dict(initial_state=jnp.zeros((2, 4, 16, 24), jnp.bfloat16)),
    r"initial_state must be float32 \(2, 4, 16, 24\)": dict(
        initial_state=jnp.zeros((2, 2, 16, 24))
    ),
    r"segment_ids must be \(2, 8\)": dict(segment_ids=jnp.zeros((2, 7), jnp.int32)),
    "segment_ids must be int32, got float32": dict(segment_ids=jnp.zeros((2, 8))),
    "segment_ids must not decrease along T; row 1 does": dict(
        segment_ids=jnp.asarray([[0] * 8, [1] * 4 + [0] * 4])
    ),
    "backend must be one of .* got 'cuda'": dict(backend="cuda"),
    "precision must be one of .* got 'high'": dict(precision="high"),
    "chunk_size must be one of .* got 48": dict(chunk_size=48),
    "interpret=True .* needs backend='tpu'": dict(interpret=True),
    r"A_log must be \(2,\) \[H\]": dict(function=gdn2_from_projections, A_log=jnp.zeros(3)),
    r"dt_bias must be \(2, 16\) \[H, K\]": dict(
        function=gdn2_from_projections, dt_bias=jnp.zeros(16)
    ),
    "lower_bound must be a finite log decay < 0": dict(
        function=gdn2_from_projections, lower_bound=1.0
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        call(**WRONG[message])


def test_values_are_checked_where_constants_meet_jit():
    arrays = small_inputs(length=4)
    ids = jnp.asarray([[1, 0, 0, 0]])
    with pytest.raises(ValueError, match="segment_ids must not decrease"):
        jax.jit(lambda q: gdn2(q, *(arrays[n] for n in PER_TOKEN[1:]), segment_ids=ids))(
            arrays["q"]
        )


def test_a_step_refuses_a_bfloat16_state():
    arrays = small_inputs(length=1)
    with pytest.raises(ValueError, match="state must be float32"):
        gdn2_step(jnp.zeros((1, 1, 16, 16), jnp.bfloat16), *(arrays[n][:, 0] for n in PER_TOKEN))


@pytest.mark.parametrize(
    ("dtype", "platform", "backend", "want"),
    [
        ("bfloat16", "cpu", "auto", ("xla", "bf16", 64)),
        ("float32", "cpu", "auto", ("xla", "f32", 64)),
        ("float32", "gpu", "auto", ("xla", "f32", 64)),
        ("float32", "tpu", "auto", ("tpu", "bf16x3", None)),
        ("bfloat16", "tpu", "auto", ("tpu", "bf16", None)),
        ("float32", "cpu", "tpu", ("tpu", "bf16x3", None)),
        ("float32", "tpu", "xla", ("xla", "bf16x3", 64)),
        ("bfloat16", "tpu", "reference", ("reference", "f32", None)),
    ],
)
def test_the_backend_is_chosen_once_and_explained(dtype, platform, backend, want):
    choice = describe_backend(dtype, backend=backend, platform=platform)
    assert (choice.backend, choice.precision, choice.chunk_size) == want
    assert (platform in choice.reason) == (backend == "auto")


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_outputs_and_gradients_have_their_argument_dtype(backend):
    arrays = small_inputs(length=5)
    dtypes = dict.fromkeys(PER_TOKEN, jnp.bfloat16) | {"g": jnp.float32, "w": jnp.float32}
    inputs = [jnp.asarray(arrays[n], dtypes[n]) for n in PER_TOKEN]
    state = jnp.asarray(arrays["initial_state"])

    def loss(state, *inputs):
        o, after = gdn2(*inputs, initial_state=state, backend=backend)
        assert o.dtype == jnp.bfloat16
        assert after.dtype == jnp.float32
        return o.astype(jnp.float32).sum() + after.sum()

    gradients = jax.eval_shape(jax.grad(loss, argnums=tuple(range(7))), state, *inputs)
    for name, gradient in zip(("initial_state", *PER_TOKEN), gradients, strict=True):
        assert gradient.dtype == dtypes.get(name, jnp.float32), name


def test_the_backward_keeps_inputs_states_and_inverses_only():
    length, chunk, size = 4096, 64, 32
    arrays = [jnp.asarray(small_inputs(length=length, key_size=size, value_size=size)[n]) for n in
              PER_TOKEN]  # fmt: skip

    def residuals(*arrays):
        _, pull = jax.vjp(lambda *a: gdn2(*a, backend="xla", chunk_size=chunk), *arrays)
        return pull

    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, *arrays)))
    inputs = 6 * length * size
    states = length // chunk * size * size
    inverses = length * chunk
    assert kept <= inputs + states + inverses + 2 * size * size


def test_value_heads_share_the_work_of_their_key_head():
    arrays = small_inputs(length=64, value_heads=4)
    inputs = [jnp.asarray(arrays[n]) for n in PER_TOKEN]
    text = str(jax.make_jaxpr(lambda *a: gdn2(*a, backend="xla", chunk_size=64))(*inputs))
    assert "f32[1,64,64]" in text  # the one key head's inverse
    assert "f32[4,64,64]" not in text


def test_a_program_is_not_unrolled_over_the_length():
    def operations(length):
        arrays = small_inputs(length=length)
        inputs = [jnp.asarray(arrays[n]) for n in PER_TOKEN]
        loss = lambda *a: gdn2(*a, backend="xla")[0].sum()  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss))(*inputs)).count("\n")

    assert operations(128) == operations(4096)


def test_the_plan_is_the_only_static_argument():
    assert xla_backend.Plan.__dataclass_params__.frozen


class TestCompat:
    """The names and orders of atomic_ops; values are those of the token-by-token reference."""

    @pytest.fixture
    def arrays(self):
        return small_inputs(length=40, value_size=16)

    @pytest.fixture
    def want(self, arrays):
        return run(arrays, backend="reference")

    def check(self, got, want):
        assert_close("o", got[0], want[0], limit=2e-6)
        assert_close("state", got[1], want[1], limit=2e-6)

    @pytest.mark.parametrize("name", ["gdn2_forward", "gdn2_forward_trainable"])
    def test_trainable_takes_w_b_g(self, arrays, want, name):
        a = arrays
        got = getattr(compat, name)(
            a["q"], a["k"], a["v"], a["w"], a["b"], a["g"], 0.25, h0=a["initial_state"]
        )
        self.check(got, want)

    def test_references_take_g_b_w(self, arrays, want):
        a = arrays
        inputs = (a["q"], a["k"], a["v"], a["g"], a["b"], a["w"], 0.25)
        serial = compat.gdn2_token_serial_reference(*inputs, a["initial_state"])
        chunked = compat.gdn2_chunked_wy_reference(*inputs, 32, a["initial_state"])
        self.check(serial, want)
        self.check(chunked, want)

    def test_a_preset_warns_of_clipping_and_damping(self, arrays):
        a = arrays
        inputs = (a["q"], a["k"], a["v"], a["w"], a["b"], a["g"], 0.25)
        with pytest.warns(UserWarning, match="is ignored") as warned:
            compat.gdn2_forward(*inputs, config=compat.KAGGLE_SMALL)
        messages = [str(w.message) for w in warned]
        assert any("clip=10000" in m for m in messages)
        assert any("wy_eps=0.001" in m for m in messages)

    def test_damping_of_the_chunked_reference_warns(self, arrays):
        a = arrays
        inputs = (a["q"], a["k"], a["v"], a["g"], a["b"], a["w"], 0.25)
        with pytest.warns(UserWarning, match="wy_eps=0.01 is ignored"):
            compat.gdn2_chunked_wy_reference(*inputs, 32, wy_eps=0.01)

    def test_a_wrong_config_is_refused(self):
        with pytest.raises(ValueError, match=r"bt must be 2 \* bc"):
            compat.KernelConfig(bt=128, bc=128)
        with pytest.raises(ValueError, match="mb must divide bc"):
            compat.KernelConfig(mb=48)

    def test_memory_is_states_and_inverses(self):
        # 2 chunks x (128^2 state + 128^2 inverse) x 4 bytes x 3 heads
        assert compat.estimate_memory(1, 256, 3) == 2 * 2 * 128**2 * 4 * 3 / 2**20
        assert compat.get_recommended_config(1, 1024, 4) == compat.KAGGLE_SMALL
        assert compat.get_recommended_config(64, 32768, 16) == compat.KAGGLE_MEDIUM

    def test_there_is_no_tpu_here(self):
        assert compat.is_tpu_available() == (jax.default_backend() == "tpu")
