# SPDX-License-Identifier: Apache-2.0
"""Times of GDN-2 implementations on one machine, same inputs, one process.

    python -m atomic_kernels.bench                     table to the screen
    python -m atomic_kernels.bench --output kernels    also bench.json and bench.md there

Forward, and forward plus backward, of: this package's xla backend; JAX's autodiff through a scan
over the same chunks; the token-by-token reference; an associative scan over token transitions
(at the short length only: it keeps a [K, K] matrix a token); and, where the package atomic-ops is
installed, its own CPU path. A time counts only if outputs and gradients agree with the reference.
Implementations take turns, so that another load on the machine meets all of them; medians are
reported. Memory is the compiler's temporary bytes of forward plus backward, the same on each run.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from atomic_kernels.accuracy import write_text
from atomic_kernels.gdn2 import gdn2, xla_chunk
from atomic_kernels.gdn2.arithmetic import PRECISION_PARTS, Rounding

BATCH, HEADS, SIZE = 1, 4, 128
LENGTH = 2048
SHORT_LENGTH = 512
LONG_LENGTHS = (1024, 2048, 4096, 8192, 16384)
CHUNK_SIZE = 64
NAMES = ("q", "k", "v", "g", "b", "w")
# Agreement of outputs and gradients with the reference, relative RMS. float32 forms reach 1e-6;
# a form that is off by more than this computes something else.
AGREEMENT = 1e-3


def gdn2_xla(*inputs: Array) -> Array:
    return gdn2(*inputs, backend="xla", chunk_size=CHUNK_SIZE)[0]


def gdn2_token_by_token(*inputs: Array) -> Array:
    return gdn2(*inputs, backend="reference")[0]


def chunked_autodiff(q: Array, k: Array, v: Array, g: Array, b: Array, w: Array) -> Array:
    """The same chunk functions in a scan, differentiated by JAX."""
    batch, length, heads, size = q.shape
    rounding = Rounding(parts=PRECISION_PARTS["f32"])

    def by_chunk(x: Array) -> Array:
        x = x.reshape(batch, length // CHUNK_SIZE, CHUNK_SIZE, heads, x.shape[-1])
        return x.transpose(1, 0, 3, 2, 4).reshape(-1, batch * heads, CHUNK_SIZE, x.shape[-1])

    def one_head(state, q, k, v, g, b, w):
        prepared = xla_chunk.prepare(q * size**-0.5, k, g, b, None, rounding)
        o, state = xla_chunk.forward(state, v, w, prepared, None, rounding)
        return state, o

    def step(state, inputs):
        return jax.vmap(one_head)(state, *inputs)

    state = jnp.zeros((batch * heads, v.shape[-1], size))
    _, o = lax.scan(step, state, tuple(map(by_chunk, (q, k, v, g, b, w))))
    o = o.reshape(-1, batch, heads, CHUNK_SIZE, v.shape[-1])
    return o.transpose(1, 0, 3, 2, 4).reshape(v.shape)


def associative_scan(q: Array, k: Array, v: Array, g: Array, b: Array, w: Array) -> Array:
    """S_t = M_t S_(t-1) + N_t with M = (I - k (b*k)^T) Diag(exp g), N = k (w*v)^T, by a scan of
    products of the pairs (M, N)."""
    size = q.shape[-1]
    erase = (b * k)[..., None, :] * jnp.exp(g)[..., None, :]  # [B, T, H, 1, K]
    transition = jnp.exp(g)[..., None] * jnp.eye(size) - k[..., None] * erase  # [B, T, H, K, K]
    written = k[..., None] * (w * v)[..., None, :]  # [B, T, H, K, V]

    def combine(left, right):
        return right[0] @ left[0], right[0] @ left[1] + right[1]

    _, state = lax.associative_scan(combine, (transition, written), axis=1)
    return size**-0.5 * jnp.einsum("bthk,bthkv->bthv", q, state)


def atomic_ops_cpu(q: Array, k: Array, v: Array, g: Array, b: Array, w: Array) -> Array:
    """PyPI atomic-ops 0.2.0's CPU path (its own chunk size, 256)."""
    from atomic_ops import gdn2_forward_trainable

    return gdn2_forward_trainable(q, k, v, w, b, g, q.shape[-1] ** -0.5)[0]


def make_inputs(length: int) -> tuple[Array, ...]:
    """q, k, v, g, b, w float32 as a layer makes them: unit keys, mild decay, gates in (0, 1)."""
    random = np.random.default_rng(0)
    shape = (BATCH, length, HEADS, SIZE)
    k = random.standard_normal(shape)
    arrays = (
        random.standard_normal(shape),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        random.standard_normal(shape),
        -np.exp(random.normal(-3.0, 1.0, shape)),
        random.uniform(size=shape),
        random.uniform(size=shape),
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


class Compiled:
    """One implementation, compiled forward and forward plus backward for a length."""

    def __init__(self, function: Callable, inputs: tuple[Array, ...]):
        def with_gradients(cotangent, *inputs):
            o, pull = jax.vjp(function, *inputs)
            return o, *pull(cotangent)

        cotangent = jnp.asarray(
            np.random.default_rng(1).standard_normal(inputs[2].shape), jnp.float32
        )
        self.forward = functools.partial(jax.jit(function).lower(*inputs).compile(), *inputs)
        both = jax.jit(with_gradients).lower(cotangent, *inputs).compile()
        self.both = functools.partial(both, cotangent, *inputs)
        memory = both.memory_analysis()
        if memory is None:
            raise RuntimeError(f"{jax.default_backend()} does not state a program's memory")
        self.temporary_bytes = memory.temp_size_in_bytes


def time_in_turns(calls: Mapping[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, `repeats` times, the calls taking turns.

    Before each timed call is one that is not timed: a program's first call after another's is
    slower, and turns would charge the same program for it each time.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            jax.block_until_ready(call())
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    return milliseconds


def disagreement(results: tuple[Array, ...], reference: tuple[Array, ...]) -> float:
    """The largest relative RMS difference over o and the six gradients."""
    differences = []
    for got, want in zip(results, reference, strict=True):
        truth = np.asarray(want, np.float64)
        error = np.asarray(got, np.float64) - truth
        differences.append(np.linalg.norm(error) / np.linalg.norm(truth))
    return float(np.max(differences))


def compare(functions: Mapping[str, Callable], length: int, repeats: int) -> list[dict]:
    """A row for each implementation at one length."""
    inputs = make_inputs(length)
    compiled = {}
    for name, function in functions.items():
        print(f"compiling {name}, T {length}", file=sys.stderr, flush=True)
        compiled[name] = Compiled(function, inputs)
    reference = jax.jit(gdn2_token_by_token)
    o, pull = jax.vjp(reference, *inputs)
    want = (o, *pull(compiled["xla"].both.args[0]))
    forward = time_in_turns({n: c.forward for n, c in compiled.items()}, repeats)
    both = time_in_turns({n: c.both for n, c in compiled.items()}, repeats)
    rows = []
    for name, item in compiled.items():
        error = disagreement(item.both(), want)
        rows.append(
            {
                "name": name,
                "length": length,
                "disagreement": error,
                "counts": error <= AGREEMENT,
                "forward_ms": float(np.median(forward[name])),
                "both_ms": float(np.median(both[name])),
                "both_ms_all": both[name],
                "temporary_mib": item.temporary_bytes / 2**20,
            }
        )
    return rows


def growth(repeats: int) -> list[dict]:
    """Forward plus backward of the xla backend at growing lengths, taking turns."""
    calls = {str(n): Compiled(gdn2_xla, make_inputs(n)).both for n in LONG_LENGTHS}
    milliseconds = time_in_turns(calls, repeats)
    return [
        {
            "length": int(n),
            "both_ms": float(np.median(ms)),
            "least_us_a_token": 1e3 * min(ms) / int(n),
            "us_a_token": 1e3 * float(np.median(ms)) / int(n),
        }
        for n, ms in milliseconds.items()
    ]


def table(report: dict) -> str:
    """The report as Markdown."""
    shape = f"B {BATCH}, H {HEADS}, K = V = {SIZE}, float32"
    lines = [
        f"{shape}; {report['platform']}, jax {report['jax']}, {report['date']}, medians of "
        f"{report['repeats']}: `{report['command']}`",
    ]
    for length in (LENGTH, SHORT_LENGTH):
        rows = [row for row in report["rows"] if row["length"] == length]
        ours = rows[0]
        lines += [
            "",
            f"| T {length} | forward ms | forward + backward ms | times ours | temporary MiB "
            "| off the reference by |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            ratio = row["both_ms"] / ours["both_ms"]
            note = "" if row["counts"] else " (does not count)"
            lines.append(
                f"| {row['name']} | {row['forward_ms']:.1f} | {row['both_ms']:.1f} | {ratio:.2f} "
                f"| {row['temporary_mib']:.1f} | {row['disagreement']:.1e}{note} |"
            )
    lines += [
        "",
        "| T | forward + backward ms | us a token | least us a token |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['length']} | {row['both_ms']:.1f} | {row['us_a_token']:.2f} "
        f"| {row['least_us_a_token']:.2f} |"
        for row in report["growth"]
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m atomic_kernels.bench")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder for bench.json and bench.md")
    options = parser.parse_args(arguments)
    functions: dict[str, Callable] = {"xla": gdn2_xla, "autodiff of the chunks": chunked_autodiff}
    if importlib.util.find_spec("atomic_ops"):
        functions["atomic-ops 0.2.0"] = atomic_ops_cpu
    slow: dict[str, Callable] = {
        "token by token": gdn2_token_by_token,
        "associative scan": associative_scan,
    }
    report = {
        "command": f"python -m atomic_kernels.bench --repeats {options.repeats}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "jax": jax.__version__,
        "repeats": options.repeats,
        "rows": compare(functions, LENGTH, options.repeats)
        + compare({**functions, **slow}, SHORT_LENGTH, options.repeats),
        "growth": growth(options.repeats),
    }
    print(table(report))
    if options.output:
        write_text(options.output / "bench.json", json.dumps(report, indent=1) + "\n")
        write_text(options.output / "bench.md", table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
