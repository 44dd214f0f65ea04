# SPDX-License-Identifier: Apache-2.0
"""Inputs on which delta-rule kernels go wrong, and the float64 oracle for them.

Used by the accuracy table, the tests and the benchmark. Each combination of decay, keys, erase
bound and segments is one batch element of one call, so that a shape is compiled once for all.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from atomic_kernels.gdn2.reference import gdn2_reference

DECAYS = ("zero", "-1e-3", "mild", "-5", "-50", "spikes", "mixed")
KEYS = ("random", "correlated 0.5", "correlated 0.9", "identical")
ERASE_BOUNDS = (1.0, 2.0)
SEGMENTS = ("one", "short", "inside")
SPIKE_NATS = -1736.0  # one token's decay in a trained layer
SPIKE_EVERY = 37  # tokens
INPUT_NAMES = ("q", "k", "v", "g", "b", "w", "initial_state")
OUTPUT_NAMES = ("o", "state")
# The gradients, and sum_t dg*g, the gradient of a decay rate (A_log) before its sum over channels.
GRADIENT_NAMES = ("dq", "dk", "dv", "dg", "db", "dw", "dh0")
ALL_NAMES = (*OUTPUT_NAMES, *GRADIENT_NAMES, "sum dg*g")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One compiled call: T tokens, one key head, `group` value heads."""

    length: int
    key_size: int
    value_size: int
    group: int = 1

    def __str__(self) -> str:
        return f"T{self.length} K{self.key_size} V{self.value_size} group {self.group}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """What one batch element holds."""

    decay: str
    keys: str
    erase_bound: float
    segments: str

    def __str__(self) -> str:
        return (
            f"decay {self.decay}, keys {self.keys}, b <= {self.erase_bound:g}, "
            f"segments {self.segments}"
        )


def all_contents() -> tuple[Content, ...]:
    """The cross of decays, keys, erase bounds and segments: 168 batch elements."""
    return tuple(
        Content(decay=decay, keys=keys, erase_bound=erase_bound, segments=segments)
        for decay, keys, erase_bound, segments in itertools.product(
            DECAYS, KEYS, ERASE_BOUNDS, SEGMENTS
        )
    )


def make_inputs(
    shape: Shape, contents: tuple[Content, ...], dtype: jax.typing.DTypeLike, *, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Input arrays by name and segment_ids [B, T]; keys have norm 1, g is float32.

    initial_state is float32; q, k, v, b, w have `dtype`.
    """
    elements = [_one_element(shape, c, np.random.default_rng([seed, n])) for n, c in
                enumerate(contents)]  # fmt: skip
    arrays = {name: np.stack([e[name] for e in elements]) for name in INPUT_NAMES}
    for name in ("q", "k", "v", "b", "w"):
        arrays[name] = arrays[name].astype(dtype)
    segment_ids = np.stack([_segment_ids(c.segments, shape.length) for c in contents])
    return arrays, segment_ids


def make_cotangents(
    shape: Shape, batch: int, dtype: jax.typing.DTypeLike, *, seed: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Random dO in `dtype` and dState in float32."""
    random = np.random.default_rng(seed)
    d_o = random.standard_normal((batch, shape.length, shape.group, shape.value_size))
    d_state = random.standard_normal((batch, shape.group, shape.key_size, shape.value_size))
    return d_o.astype(dtype), d_state.astype(np.float32)


def _one_element(
    shape: Shape, content: Content, random: np.random.Generator
) -> dict[str, np.ndarray]:
    length, key_size = shape.length, shape.key_size
    by_key = (length, 1, key_size)
    by_value = (length, shape.group, shape.value_size)
    return {
        "q": _float32(random.standard_normal(by_key)),
        "k": _float32(_keys(content.keys, by_key, random)),
        "v": _float32(random.standard_normal(by_value)),
        "g": _float32(_decay(content.decay, by_key, random)),
        "b": _float32(content.erase_bound * random.uniform(size=by_key)),
        "w": _float32(random.uniform(size=by_value)),
        "initial_state": _float32(
            random.standard_normal((shape.group, key_size, shape.value_size))
        ),
    }


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _keys(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Unit keys whose mean cosine is 0, 0.5, 0.9 or 1."""
    cosine = {"random": 0.0, "correlated 0.5": 0.5, "correlated 0.9": 0.9, "identical": 1.0}[kind]
    common = random.standard_normal((1, *shape[1:]))
    keys = cosine**0.5 * common + (1 - cosine) ** 0.5 * random.standard_normal(shape)
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def _decay(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    mild = -np.exp(random.normal(-3.0, 1.0, shape))  # most of it in -0.3 .. -0.01 nats
    spiked = mild.copy()
    spiked[SPIKE_EVERY // 2 :: SPIKE_EVERY] = SPIKE_NATS
    constant = {"zero": 0.0, "-1e-3": -1e-3, "-5": -5.0, "-50": -50.0}
    kinds = {name: np.full(shape, value) for name, value in constant.items()}
    kinds |= {"mild": mild, "spikes": spiked}
    if kind == "mixed":  # channel d follows the kind number d mod 6
        g = np.stack(list(kinds.values()))[
            np.arange(shape[-1]) % len(kinds), ..., np.arange(shape[-1])
        ]
        return np.moveaxis(g, 0, -1)
    return kinds[kind]


def _segment_ids(kind: str, length: int) -> np.ndarray:
    """ "one"; "short": lengths 1 and 2 in turn; "inside": lengths that end inside chunks."""
    lengths = {"one": (length,), "short": (1, 2), "inside": (45, 7, 1, 90, 29)}[kind]
    numbers = np.repeat(np.arange(length), np.resize(lengths, length))[:length]
    return numbers.astype(np.int32)


def oracle(
    inputs: dict[str, np.ndarray],
    segment_ids: np.ndarray | None,
    cotangents: tuple[np.ndarray, np.ndarray],
    *,
    elements_at_once: int,
) -> dict[str, np.ndarray]:
    """o, state and every gradient by the token-by-token recurrence and JAX's autodiff in float64.

    The values are those of the (rounded) inputs. Autodiff keeps a state a token, so
    `elements_at_once` batch elements are done together.
    """
    batch = len(inputs["q"])
    scale = inputs["q"].shape[-1] ** -0.5
    if segment_ids is None:
        segment_ids = np.zeros(inputs["q"].shape[:2], np.int32)

    def run(ids, d_o, d_state, *arrays):
        def forward(*arrays):
            return gdn2_reference(
                *arrays[:6], scale=scale, initial_state=arrays[6], segment_ids=ids
            )

        outputs, pull = jax.vjp(forward, *arrays)
        return *outputs, *pull((d_o, d_state))

    with jax.enable_x64(True):
        compiled = jax.jit(run)
        parts = []
        for start in range(0, batch, elements_at_once):
            part = slice(start, start + elements_at_once)
            floats = (cotangents[0], cotangents[1], *(inputs[name] for name in INPUT_NAMES))
            floats64 = [jnp.asarray(x[part].astype(np.float64)) for x in floats]
            results = compiled(jnp.asarray(segment_ids[part]), *floats64)
            parts.append([np.asarray(x) for x in results])
    names = (*OUTPUT_NAMES, *GRADIENT_NAMES)
    results = {
        name: np.concatenate(x) for name, x in zip(names, zip(*parts, strict=True), strict=True)
    }
    return add_decay_rate_gradient(results, inputs["g"])


def add_decay_rate_gradient(results: dict[str, np.ndarray], g: np.ndarray) -> dict[str, np.ndarray]:
    """Adds "sum dg*g" [B, H, K], summed in float64."""
    product = results["dg"].astype(np.float64) * g.astype(np.float64)
    return results | {"sum dg*g": product.sum(1)}


def relative_rms(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """||got - want|| / ||want|| for each batch element [B]; 0 / 0 is 0, non-finite is infinite."""
    axes = tuple(range(1, want.ndim))
    got = got.astype(np.float64)
    error = np.sqrt(np.square(got - want).sum(axes))
    size = np.sqrt(np.square(want).sum(axes))
    relative = np.where(error == 0, 0.0, error / np.where(size == 0, np.nan, size))
    return np.where(np.isfinite(relative), relative, np.inf)
