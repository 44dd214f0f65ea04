# SPDX-License-Identifier: Apache-2.0
"""What every parameter starts as, by its name.

    A_log                   uniform in [ln 1, ln 16]                        published
    dt_bias                 softplus^-1 of log-uniform [1e-3, 0.1]          published
    query (depth routing)   0                                               published
    scales, biases          1, 0
    tables                  normal, standard deviation 0.02                 our choice (GPT-2's)
    convolutions            uniform in +-1/sqrt(taps)                       our choice
    o, down (see below)     normal, variance 1 / (fan-in x sublayers)       our choice
    other matrices          normal, variance 1 / fan-in                     our choice

`o` and `down` write a sublayer's result to the residual stream, whose sum over all sublayers thus
starts at the size of one. All normal values of a model come from one draw and all uniform ones
from another, cut in the order of the names: compiling a generator for each parameter took a small
model 17 s of CPU time, and this takes 3.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from atomic_lib.model.config import ModelConfig

Array = jax.Array

TABLE_STD = 0.02
# exp(A_log), and softplus(dt_bias) in nats a token, are uniform in log between these.
DECAY_RATE_RANGE = (1.0, 16.0)
TIME_STEP_RANGE = (1e-3, 0.1)


# Elements of one draw: a larger model takes several, so that a begin fits an int32 index.
MAX_DRAW = 2**30


def _between(uniform: Array, low: float, high: float) -> Array:
    return low + (high - low) * uniform


def decay_rate_log(uniform: Array) -> Array:
    """A_log from numbers that are uniform in [0, 1)."""
    return _between(uniform, *map(math.log, DECAY_RATE_RANGE))


def time_step_bias(uniform: Array) -> Array:
    """dt_bias from numbers that are uniform in [0, 1): the inverse softplus of the time step."""
    step = jnp.exp(_between(uniform, *map(math.log, TIME_STEP_RANGE)))
    return step + jnp.log(-jnp.expm1(-step))


def _normal_std(config: ModelConfig, name: str, shape: tuple[int, ...]) -> float | None:
    """Standard deviation of a parameter that starts normal, else None."""
    *_, owner, leaf = name.split("/")
    if leaf == "table":
        return TABLE_STD
    if leaf != "kernel" or owner.endswith("_conv"):
        return None
    writes_residual = owner in ("o", "down")
    return (shape[0] * (config.sublayer_count if writes_residual else 1)) ** -0.5


def _from_uniform(name: str, uniform: Array) -> Array:
    """A_log, dt_bias or a convolution [taps, C] from numbers that are uniform in [0, 1)."""
    leaf = name.rsplit("/", 1)[-1]
    if leaf == "A_log":
        return decay_rate_log(uniform)
    if leaf == "dt_bias":
        return time_step_bias(uniform)
    bound = uniform.shape[0] ** -0.5
    return _between(uniform, -bound, bound)


def _packs(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Splits the parameters into consecutive groups of at most MAX_DRAW elements."""
    packs: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        if math.prod(shape) > room:
            packs.append({})
            room = MAX_DRAW
        packs[-1][name] = shape
        room -= math.prod(shape)
    return packs


@partial(jax.jit, static_argnames=("kind", "size"))
def _draw(key: Array, *, kind: str, size: int) -> Array:
    sample = jax.random.normal if kind == "normal" else jax.random.uniform
    return sample(key, (size,))


@partial(jax.jit, static_argnames="shape")
def _cut(flat: Array, begin: int, *, shape: tuple[int, ...]) -> Array:
    return jax.lax.dynamic_slice(flat, (begin,), (math.prod(shape),)).reshape(shape)


def _drawn(kind: str, key: Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Returns standard numbers of a kind ("normal" or "uniform") in these shapes."""
    parts = {}
    for number, pack in enumerate(_packs(shapes)):
        size = sum(map(math.prod, pack.values()))
        flat = _draw(jax.random.fold_in(key, number), kind=kind, size=size)
        begin = 0
        for name, shape in pack.items():
            parts[name] = _cut(flat, begin, shape=shape)
            begin += math.prod(shape)
    return parts


def initial_values(config: ModelConfig, key: Array) -> dict[str, Array]:
    """Returns every parameter by name, float32, as a run with this key starts."""
    shapes = dict(sorted(config.parameter_shapes.items()))
    stds = {
        name: std
        for name, shape in shapes.items()
        if (std := _normal_std(config, name, shape)) is not None
    }
    normal = {name: shapes[name] for name in stds}
    uniform = {
        name: shape
        for name, shape in shapes.items()
        if name not in normal and name.endswith(("/kernel", "A_log", "dt_bias"))
    }
    normal_key, uniform_key = jax.random.split(key)
    values = {
        name: stds[name] * value for name, value in _drawn("normal", normal_key, normal).items()
    }
    for name, value in _drawn("uniform", uniform_key, uniform).items():
        values[name] = _from_uniform(name, value)
    for name in shapes.keys() - values.keys():
        fill = jnp.ones if name.endswith("scale") else jnp.zeros
        values[name] = fill(shapes[name], jnp.float32)
    return {name: values[name] for name in shapes}
