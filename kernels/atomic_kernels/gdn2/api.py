# SPDX-License-Identifier: Apache-2.0
"""The public functions: arguments are checked, a backend is chosen once, arrays are laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.tpu import InterpretParams

from atomic_kernels.gdn2 import checks, xla
from atomic_kernels.gdn2.arithmetic import PRECISION_PARTS, Rounding, default_precision
from atomic_kernels.gdn2.chunk import Inputs
from atomic_kernels.gdn2.gates import Projections
from atomic_kernels.gdn2.reference import gdn2_reference
from atomic_kernels.gdn2.tpu_api import HEAD_SIZES, gdn2_tpu
from atomic_kernels.gdn2.tpu_step import gdn2_step_tpu

# Rows of a chunk on the XLA backend. Products grow with it, saved states shrink with it.
XLA_CHUNK_SIZE = 64
# Chunks whose state-free work an accelerator does together. On an H200 at (B 8, T 4096, H 6, 128),
# bf16, forward + backward: 28.0 ms with 1, 19.3 with 8, 17.8 with 32 and three times the memory.
ACCELERATOR_CHUNKS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """Which backend runs, at which precision and chunk size, and why."""

    backend: str
    precision: str
    chunk_size: int | None
    reason: str


def describe_backend(
    dtype: jax.typing.DTypeLike,
    *,
    backend: str = "auto",
    precision: str | None = None,
    chunk_size: int | None = None,
    platform: str | None = None,
) -> BackendChoice:
    """What `gdn2` does with inputs of `dtype` on `platform` (default: JAX's), and why.

    A backend asked for by name is never replaced. Raises ValueError for unknown names.
    """
    checks.check_choices(backend, precision, chunk_size, interpret=False)
    platform = platform or jax.default_backend()
    reason = "asked for by name"
    if backend == "auto":
        backend = "tpu" if platform == "tpu" else "xla"
        reason = f"auto: JAX's default platform is {platform}"
    if backend == "reference":
        return BackendChoice(backend=backend, precision="f32", chunk_size=None, reason=reason)
    if precision is None:
        precision = default_precision(dtype, "tpu" if backend == "tpu" else platform)
        reason += f"; precision follows the inputs' dtype, {jnp.dtype(dtype).name}"
    if backend == "xla":
        chunk_size = chunk_size or XLA_CHUNK_SIZE
    return BackendChoice(backend=backend, precision=precision, chunk_size=chunk_size, reason=reason)


def gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    backend: str = "auto",
    interpret: bool | InterpretParams = False,
) -> tuple[Array, Array]:
    """Gated DeltaNet-2 over a sequence: S~ = Diag(exp g) S, r = w*v - S~^T (b*k),
    S = S~ + k r^T, o = scale S^T q, token by token.

    q, k, g, b [B, T, H, K]; v, w [B, T, Hv, V], bfloat16 or float32; Hv is a multiple of H and
    value head h reads key head h // (Hv / H). g is the log decay in nats, <= 0, unbounded below;
    b erases, in [0, 2]; w writes, in [0, 1]. scale defaults to K^-1/2. initial_state
    [B, Hv, K, V] float32 (zeros by default). segment_ids [B, T] int32, not decreasing: the state
    restarts where the number changes; initial_state feeds the first segment.

    chunk_size (16 .. 256, a power of two), precision ("bf16", "bf16x3", "f32") and backend
    ("auto", "reference", "xla", "tpu") have defaults that `describe_backend` explains;
    interpret=True runs the TPU kernel on the CPU, an InterpretParams in Pallas' TPU interpreter
    (uninitialised memory, races).

    Returns o [B, T, Hv, V] in v's dtype and the last state [B, Hv, K, V] in float32. Gradients
    reach all six inputs and initial_state, each in its argument's dtype. A NaN in an input gives
    NaN at every token that depends on it. Raises ValueError, naming the argument, for a wrong
    shape, dtype or name; for g > 0 and decreasing segment_ids where values are known (outside
    jit). Source: the GDN-2 recurrence; the chunk form is derived in `chunk`.
    """
    return _run(
        (q, k, v, g, b, w), None, (None, None),
        scale=scale, initial_state=initial_state, segment_ids=segment_ids,
        chunk_size=chunk_size, precision=precision, backend=backend, interpret=interpret,
    )  # fmt: skip


def gdn2_from_projections(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = True,
    negative_eigenvalues: bool = False,
    scale: float | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    backend: str = "auto",
    interpret: bool | InterpretParams = False,
) -> tuple[Array, Array]:
    """`gdn2` on raw projections, activated in float32 inside the operation.

    Arrays and options as in `gdn2`, but q, k, g, b, w are unbounded projections:
    q, k <- x / sqrt(sum x^2 + 1e-6) unless qk_l2norm is False; g <- -exp(A_log) softplus(g +
    dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)) when lower_bound (nats, < 0) is
    given; b <- sigmoid(b), doubled with negative_eigenvalues; w <- sigmoid(w). A_log [H] and
    dt_bias [H, K] default to zeros. Gradients reach the projections, A_log and dt_bias in their
    dtypes; the activated inputs are not kept for the backward. Raises ValueError as `gdn2` does.
    """
    projections = Projections(
        qk_l2norm=qk_l2norm, negative_eigenvalues=negative_eigenvalues, lower_bound=lower_bound
    )
    return _run(
        (q, k, v, g, b, w), projections, (A_log, dt_bias),
        scale=scale, initial_state=initial_state, segment_ids=segment_ids,
        chunk_size=chunk_size, precision=precision, backend=backend, interpret=interpret,
    )  # fmt: skip


def gdn2_step(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    *,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Advances the state by one token: decay, erase, write, then read.

    state [B, Hv, K, V] float32; q, k, g, b [B, H, K]; v, w [B, Hv, V]; otherwise as `gdn2`.
    Returns o [B, Hv, V] in v's dtype and the new state. Raises ValueError, naming the argument,
    for a wrong shape or dtype.
    """
    inputs = tuple(map(jnp.asarray, (q, k, v, g, b, w)))
    state = jnp.asarray(state)
    checks.check_inputs(inputs, sequence=False, allow_float64=False)
    checks.check_state("state", state, inputs, allow_float64=False)
    checks.check_decay(inputs[3])
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    return _step(float(scale), state, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(scale: float, state: Array, *inputs: Array) -> tuple[Array, Array]:
    """The kernel where the program is compiled for a TPU, else XLA's fusion."""
    if not set(state.shape[2:]) <= set(HEAD_SIZES):
        return _step_xla(scale, state, *inputs)
    return jax.lax.platform_dependent(
        state,
        *inputs,
        tpu=functools.partial(gdn2_step_tpu, scale=scale),
        default=functools.partial(_step_xla, scale),
    )


def _step_xla(scale: float, state: Array, *inputs: Array) -> tuple[Array, Array]:
    repeats = inputs[2].shape[1] // inputs[0].shape[1]
    q, k, g, b = (
        jnp.repeat(inputs[n].astype(jnp.float32), repeats, axis=1) for n in (0, 1, 3, 4)
    )  # [B, Hv, K]
    v, w = (inputs[n].astype(jnp.float32) for n in (2, 5))  # [B, Hv, V]
    # Sums over K as elementwise products: a state is read once, and no operand is rounded.
    state = state * jnp.exp(g)[..., None]  # [B, Hv, K, V]
    read = (state * (b * k)[..., None]).sum(-2)  # [B, Hv, V]
    state = state + k[..., None] * (w * v - read)[..., None, :]
    o = scale * (state * q[..., None]).sum(-2)
    return o.astype(inputs[2].dtype), state


_step.defvjp(
    lambda scale, *arrays: (_step(scale, *arrays), arrays),
    lambda scale, arrays, cotangents: jax.vjp(functools.partial(_step_xla, scale), *arrays)[1](
        cotangents
    ),
)


def _run(
    inputs, projections, gate_parameters, *,
    scale, initial_state, segment_ids, chunk_size, precision, backend, interpret,
):  # fmt: skip
    """Checks, chooses and calls; `projections` is None when the inputs are activated already."""
    checks.check_choices(backend, precision, chunk_size, interpret)
    inputs = Inputs(*map(jnp.asarray, inputs))
    float64 = backend == "reference"
    checks.check_inputs(tuple(inputs), sequence=True, allow_float64=float64)
    if projections is None:
        checks.check_decay(inputs.g)
    else:
        A_log, dt_bias = (None if x is None else jnp.asarray(x) for x in gate_parameters)
        checks.check_gate_parameters(A_log, dt_bias, projections.lower_bound, inputs.q)
        gate_parameters = (A_log, dt_bias)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        checks.check_segment_ids(segment_ids, tuple(inputs))
        segment_ids = segment_ids.astype(jnp.int32)
    if initial_state is not None:
        initial_state = jnp.asarray(initial_state)
        checks.check_state("initial_state", initial_state, tuple(inputs), allow_float64=float64)
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale

    dtype = jnp.result_type(inputs.q, inputs.k, inputs.v)
    choice = describe_backend(dtype, backend=backend, precision=precision, chunk_size=chunk_size)
    if choice.backend == "reference":
        if projections is not None:
            inputs = projections.activate(inputs, *gate_parameters)
        o, state = gdn2_reference(
            *inputs, scale=scale, initial_state=initial_state, segment_ids=segment_ids
        )
        return o, state
    if choice.backend == "tpu":
        return gdn2_tpu(
            inputs, projections, gate_parameters, initial_state, segment_ids,
            scale=scale, chunk_size=choice.chunk_size, precision=choice.precision,
            interpret=interpret,
        )  # fmt: skip
    return _run_xla(inputs, projections, gate_parameters, initial_state, segment_ids, scale, choice)


def _chunks_at_once(length: int, chunk_size: int) -> int:
    """Few enough that the last group is not mostly padding; 1 on a CPU, for its cache."""
    if jax.default_backend() == "cpu":
        return 1
    chunks = -(-length // chunk_size)
    groups = -(-chunks // ACCELERATOR_CHUNKS_AT_ONCE)
    return -(-chunks // groups)


def _run_xla(inputs, projections, gate_parameters, initial_state, segment_ids, scale, choice):
    batch, length, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    group = value_heads // heads
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, key_size, value_size), jnp.float32)
    plan = xla.Plan(
        scale=float(scale),
        chunk_size=choice.chunk_size,
        chunks_at_once=_chunks_at_once(length, choice.chunk_size),
        rounding=Rounding(parts=PRECISION_PARTS[choice.precision]),
        projections=projections,
    )
    # The value heads of a key head become further columns of V: [B, T, Hv, V] -> [B, T, H, G V].
    wide = (batch, length, heads, group * value_size)
    inputs = inputs._replace(v=inputs.v.reshape(wide), w=inputs.w.reshape(wide))
    # S^T [B, H, G V, K].
    state = initial_state.swapaxes(2, 3).reshape(batch, heads, group * value_size, key_size)
    o, state = xla.gdn2_chunked(plan, inputs, gate_parameters, state, segment_ids)
    state = state.reshape(batch, value_heads, value_size, key_size).swapaxes(2, 3)
    return o.reshape(batch, length, value_heads, value_size), state
