# SPDX-License-Identifier: Apache-2.0
"""The two TPU kernels in interpret mode: outputs, states and every gradient.

The oracle is the token-by-token reference in float64 and JAX's derivative of it; it shares no
code with the kernels. The kernels' own rounding of matrix operands is made here too (interpret
mode would multiply float32 as it is), so these errors are those of a matrix unit up to the order
of its sums. Limits are those of the project's accuracy table: relative RMS, 1e-4 in three bfloat16
passes, and 6e-3 (outputs), 1e-2 (q, k, v, state), 1.2e-2 (gates) in one.

A compile of the interpreted kernels takes half a minute, so each case varies many things at once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels import accuracy, hard_inputs
from atomic_kernels.gdn2 import gdn2, gdn2_from_projections, gdn2_step
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.gates import Projections
from atomic_kernels.gdn2.reference import gdn2_reference
from atomic_kernels.gdn2.tpu_step import gdn2_step_tpu
from atomic_kernels.hard_inputs import Shape
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # no public name for `races`
from jax.experimental.pallas import tpu as pltpu

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "db", "dw", "d_initial_state", "dA_log", "ddt_bias")
LIMITS = {
    "bf16": {name: 6e-3 if name in ("o", "state") else 1.2e-2 for name in NAMES}
    | dict.fromkeys(("dq", "dk", "dv", "d_initial_state"), 1e-2),
    "bf16x3": dict.fromkeys(NAMES, 1e-4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    dtype: str = "float32"
    T: int = 130  # one chunk of 128 and two tokens
    H: int = 1
    group: int = 1
    K: int = 128
    V: int = 128
    decay: str = "mild"
    cosine: float = 0.0
    erase: float = 1.0
    segmented: bool = False
    projections: bool = False
    decay_parameters: bool = False  # A_log and dt_bias
    watched: bool = False  # in the interpreter that fills memory with NaN and looks for races

    def __str__(self) -> str:
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


CASES = [
    Case(T=140, H=3, segmented=True, group=2, V=64),  # heads outside tokens in memory
    Case(dtype="bfloat16", T=100, projections=True),
    Case(
        T=129,
        H=2,
        K=64,
        V=128,
        projections=True,
        decay_parameters=True,
        segmented=True,
        watched=True,
    ),
]


def make_inputs(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The six inputs, then A_log and dt_bias if the case has them, all float64."""
    generator = np.random.default_rng(7)
    keys = (1, case.T, case.H, case.K)
    values = (1, case.T, case.H * case.group, case.V)
    k = np.sqrt(1 - case.cosine) * generator.standard_normal(keys)
    k = k + np.sqrt(case.cosine) * generator.standard_normal(case.K)
    q = generator.standard_normal(keys)
    v, w = generator.standard_normal((2, *values))
    b = generator.standard_normal(keys)
    g = generator.standard_normal(keys)
    if case.decay_parameters:
        A_log = generator.standard_normal(case.H)
        return [q, k, v, g, b, w], [A_log, generator.standard_normal((case.H, case.K)) - 2.0]
    if case.projections:
        return [q, k, v, g - 2.0, b, w], []
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(g - 3.0)
    if case.decay == "spikes":
        g[:, ::37] = -1736.0
    gate = [case.erase / (1 + np.exp(-b)), 1 / (1 + np.exp(-w))]
    return [q, k, v, g, *gate], []


def segments(case: Case) -> jax.Array | None:
    if not case.segmented:
        return None
    starts = np.zeros(case.T, int)
    starts[[1, 3, 40, 128]] = 1  # lengths 1 and 2, inside a chunk, at its boundary
    return jnp.asarray(np.cumsum(starts)[None], jnp.int32)


def operation(case: Case, segment_ids, **options):
    def run(q, k, v, g, b, w, state, *gates):
        options_ = {"initial_state": state, "segment_ids": segment_ids, **options}
        if case.projections:
            named = dict(zip(("A_log", "dt_bias"), gates, strict=False))
            return gdn2_from_projections(q, k, v, g, b, w, **named, **options_)
        return gdn2(q, k, v, g, b, w, **options_)

    return run


def reference(case: Case, segment_ids):
    def run(q, k, v, g, b, w, state, *gates):
        inputs = Inputs(q, k, v, g, b, w)
        if case.projections:
            inputs = Projections().activate(inputs, *(gates or (None, None)))
        scale = case.K**-0.5
        return gdn2_reference(*inputs, scale=scale, initial_state=state, segment_ids=segment_ids)

    return run


def with_gradients(run, arrays, cotangents):
    outputs, pull = jax.vjp(run, *arrays)
    return (*outputs, *pull(cotangents))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_the_reference(case: Case):
    generator = np.random.default_rng(11)
    inputs, gates = make_inputs(case)
    dtype = jnp.dtype(case.dtype)
    state_shape = (1, case.H * case.group, case.K, case.V)
    state, d_state = generator.standard_normal((2, *state_shape)).astype(np.float32)
    d_o = generator.standard_normal(inputs[2].shape)
    rounded = [jnp.asarray(x, jnp.float32 if n == 3 else dtype) for n, x in enumerate(inputs)]
    arrays = [*rounded, jnp.asarray(state), *(jnp.asarray(x, jnp.float32) for x in gates)]
    cotangents = (jnp.asarray(d_o, dtype), jnp.asarray(d_state))
    segment_ids = segments(case)
    interpret = pltpu.InterpretParams(detect_races=True) if case.watched else True
    run = operation(case, segment_ids, backend="tpu", interpret=interpret)
    compiled = jax.jit(lambda a, c: with_gradients(run, a, c))
    found = jax.block_until_ready(compiled(arrays, cotangents))
    if case.watched:
        assert not interpret_pallas_call.races.races_found
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        exact_cotangents = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in cotangents)
        exact_run = reference(case, segment_ids)
        wanted = jax.jit(lambda a, c: with_gradients(exact_run, a, c))(exact, exact_cotangents)
    limits = LIMITS["bf16" if case.dtype == "bfloat16" else "bf16x3"]
    kinds = [cotangents[0], cotangents[1], *arrays]
    for name, x, y, like in zip(NAMES, found, wanted, kinds, strict=False):
        assert x.shape == like.shape, name
        assert x.dtype == like.dtype, name
        x, y = np.asarray(x, np.float64), np.asarray(y)
        assert np.isfinite(x).all(), f"{name} is not finite"
        scale = np.sqrt(np.mean(y**2))
        error = np.sqrt(np.mean((x - y) ** 2))
        worst = np.unravel_index(np.argmax(np.abs(x - y)), x.shape)
        # An exact zero (nothing reaches past a segment's start) must be zero.
        assert error <= limits[name] * scale, (
            f"{name}: {error / max(scale, 1e-300):.1e}, {x[worst]} for {y[worst]} at {worst}"
        )


HARD = tuple(
    accuracy.Case(shape=shape, dtype=dtype, chunk_size=chunk_size)
    for shape, dtype, chunk_size in (
        (Shape(length=200, key_size=64, value_size=128), "bfloat16", 128),
        (Shape(length=129, key_size=64, value_size=64), "float32", 64),
    )
)


@pytest.mark.parametrize("case", HARD, ids=str)
def test_hard_inputs_stay_within_the_limits(case: accuracy.Case):
    """Every decay, kind of keys and segments: identical keys are where one pass is not enough."""
    contents = hard_inputs.all_contents()[HARD.index(case) :: 5]
    worst = accuracy.measure(case, contents, backend="tpu")
    limits = LIMITS["bf16" if case.dtype == "bfloat16" else "bf16x3"]
    failures = [x for x in worst if not x.error <= limits.get(x.name, limits["dg"])]
    assert not failures, failures


@pytest.mark.parametrize(("value_heads", "dtype"), [(2, "float32"), (4, "bfloat16")])
def test_step_kernel_equals_the_operation(value_heads: int, dtype: str):
    """The decode kernel against gdn2_step off the TPU; both are float32 throughout."""
    generator = np.random.default_rng(3)
    q, k, b = generator.standard_normal((3, 3, 2, 128)) / 12
    g = -np.exp(generator.standard_normal((3, 2, 128)))
    v, w = generator.standard_normal((2, 3, value_heads, 64))
    state = jnp.asarray(generator.standard_normal((3, value_heads, 128, 64)), jnp.float32)
    inputs = [jnp.asarray(x, dtype) for x in (q, k, v, g, b, w)]
    found = gdn2_step_tpu(state, *inputs, scale=0.1, interpret=True)
    wanted = gdn2_step(state, *inputs, scale=0.1)
    for name, x, y in zip(("o", "state"), found, wanted, strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == y.dtype, name
        limit = 2.0**-8 if x.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=limit, atol=limit,
            err_msg=name,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 32}, "K = 32"),
        ({"V": 96}, "V = 96"),
        ({"chunk_size": 32}, r"chunk_size \(128, 64\), got 32"),
    ],
)
def test_sizes_that_the_kernels_lack_are_refused(change: dict, message: str):
    sizes = {"K": 128, "V": 128, **change}
    keys, values = jnp.zeros((1, 4, 1, sizes["K"])), jnp.zeros((1, 4, 1, sizes["V"]))
    with pytest.raises(NotImplementedError, match=message):
        gdn2(
            keys, keys, values, keys, keys, values,
            backend="tpu", interpret=True, chunk_size=change.get("chunk_size"),
        )  # fmt: skip


def test_a_nan_reaches_what_depends_on_it_and_no_earlier_chunk_nor_other_head():
    names = ("q", "k", "v", "g", "b", "w")
    inputs, _ = make_inputs(Case(T=150, H=2, K=64, V=64))
    clean = {name: np.float32(x) for name, x in zip(names, inputs, strict=True)}
    compiled = jax.jit(lambda x: gdn2(**x, backend="tpu", chunk_size=64, interpret=True)[0])
    token = 70  # in the second of three chunks
    for name in names:
        arrays = clean | {name: clean[name].copy()}
        arrays[name][0, token, 0, 3] = np.nan
        o = np.isnan(compiled(arrays))[0]  # [T, H, V]
        assert o[token].any(-1)[0], name
        assert name == "q" or o[token:, 0].any(-1).all(), name
        assert not o[:64, 0].any(), name
        assert not o[:, 1].any(), name
