# SPDX-License-Identifier: Apache-2.0
"""Accuracy of GDN-2 on hard inputs, against the float64 recurrence and its autodiff.

    python -m atomic_kernels.accuracy                 shapes in pairs, minutes to an hour; the table
    python -m atomic_kernels.accuracy --scope quick   a few shapes
    python -m atomic_kernels.accuracy --scope full    the whole cross of shapes, chunks and groups
    python -m atomic_kernels.accuracy --backend tpu   the TPU kernels, interpreted

The contents (decay x keys x b x segments, 168 of them) are the batch elements of a shape: all of
them with --scope full, else as many as ORACLE_WORK allows, in turn. Reported is the relative RMS
error of the worst batch element, with what it held. Exit status 1 if a limit
is passed. --workers n runs shapes in n processes.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atomic_kernels import hard_inputs
from atomic_kernels.gdn2 import describe_backend, gdn2
from atomic_kernels.gdn2.tpu_tiles import CHUNK_SIZES as CHUNK_SIZES_TPU
from atomic_kernels.hard_inputs import ALL_NAMES, INPUT_NAMES, Content, Shape

LENGTHS = (1, 2, 15, 63, 64, 65, 127, 128, 129, 200, 1000)
HEAD_SIZES = ((64, 64), (128, 128), (256, 256), (128, 64), (64, 256))
GROUPS = (1, 2, 4)
CHUNK_SIZES = {"xla": (32, 64, 128), "tpu": CHUNK_SIZES_TPU}
DTYPES = ("bfloat16", "float32")
LIMITS = {
    "bf16": dict.fromkeys(ALL_NAMES, 1e-2)
    | dict.fromkeys(("o", "state"), 6e-3)
    | dict.fromkeys(("db", "dw", "dg", "sum dg*g"), 1.2e-2),
    "bf16x3": dict.fromkeys(ALL_NAMES, 1e-4),
    "f32": dict.fromkeys(ALL_NAMES, 2e-5),
}
# The oracle's work, in numbers of state updated: 168 contents at T 1000, K = V = 32. It keeps a
# large shape to a minute, where all contents would take an hour.
ORACLE_WORK = 168 * 1000 * 32 * 32
# A state of the oracle's autodiff is kept for each token: 2 GiB of them at once.
ORACLE_BYTES = 2 * 1024**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled call."""

    shape: Shape
    dtype: str
    chunk_size: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} chunk {self.chunk_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest error of one output or gradient in one case."""

    name: str
    error: float
    content: str


def cases_of(scope: str, backend: str = "xla") -> tuple[Case, ...]:
    """ "full": all; "pairs": each length with each head size in each dtype, groups and chunk sizes
    in turn; "quick": six of those."""
    chunks = CHUNK_SIZES[backend]
    if scope == "full":
        return tuple(
            _case(*choice)
            for choice in itertools.product(LENGTHS, HEAD_SIZES, GROUPS, chunks, DTYPES)
        )
    if scope == "pairs":
        pairs = itertools.product(enumerate(LENGTHS), enumerate(HEAD_SIZES), enumerate(DTYPES))
        return tuple(
            _case(
                length, sizes, GROUPS[(i + j + n) % 3], chunks[(i + 2 * j + n) % len(chunks)], dtype
            )
            for (i, length), (j, sizes), (n, dtype) in pairs
        )
    quick = (
        _case(65, (64, 64), 2, 32, "float32"),
        _case(129, (128, 64), 1, 128, "float32"),
        _case(200, (64, 256), 1, 64, "float32"),
        _case(65, (64, 64), 2, 64, "bfloat16"),
        _case(200, (64, 64), 1, 128, "bfloat16"),
        _case(129, (64, 128), 1, 64, "bfloat16"),
    )
    return tuple(
        case if case.chunk_size in chunks else dataclasses.replace(case, chunk_size=chunks[-1])
        for case in quick
    )


def _case(length: int, sizes: tuple[int, int], group: int, chunk_size: int, dtype: str) -> Case:
    shape = Shape(length=length, key_size=sizes[0], value_size=sizes[1], group=group)
    return Case(shape=shape, dtype=dtype, chunk_size=chunk_size)


def contents_of(number: int, case: Case, scope: str) -> tuple[Content, ...]:
    """The contents of the case with this number: all, or a share that differs from case to case."""
    contents = hard_inputs.all_contents()
    if scope == "full":
        return contents
    count = min(len(contents), max(8, ORACLE_WORK // _state_numbers(case.shape)))
    # 37 has no divisor in common with 168: successive picks differ in every axis.
    return tuple(contents[37 * (number * count + n) % len(contents)] for n in range(count))


def _state_numbers(shape: Shape) -> int:
    return shape.length * shape.group * shape.key_size * shape.value_size


def measure(
    case: Case,
    contents: tuple[Content, ...],
    *,
    precision: str | None = None,
    backend: str = "xla",
) -> list[Worst]:
    """The worst relative RMS error of each output and gradient over the batch elements.

    Backend "tpu" is interpreted: the kernels' own bodies, with the matrix unit's rounding.
    """
    errors = relative_errors(
        case.shape,
        contents,
        case.dtype,
        chunk_size=case.chunk_size,
        precision=precision,
        backend=backend,
        interpret=backend == "tpu",
    )
    worst = []
    for name in ALL_NAMES:
        place = int(errors[name].argmax())
        worst.append(
            Worst(name=name, error=float(errors[name][place]), content=str(contents[place]))
        )
    return worst


def relative_errors(
    shape: Shape,
    contents: tuple[Content, ...],
    dtype: jax.typing.DTypeLike,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Relative RMS error against float64 of each of ALL_NAMES, for each content [B].

    A result that is not finite has an infinite error. options go to `gdn2`.
    """
    inputs, segment_ids = hard_inputs.make_inputs(shape, contents, jnp.dtype(dtype))
    cotangents = hard_inputs.make_cotangents(shape, len(contents), jnp.dtype(dtype))
    at_once = max(1, min(len(contents), ORACLE_BYTES // (8 * _state_numbers(shape))))
    want = hard_inputs.oracle(inputs, segment_ids, cotangents, elements_at_once=at_once)

    def run(segment_ids, cotangents, *arrays):
        def forward(*arrays):
            return gdn2(*arrays[:6], initial_state=arrays[6], segment_ids=segment_ids, **options)

        outputs, pull = jax.vjp(forward, *arrays)
        return *outputs, *pull(cotangents)

    arrays = [jnp.asarray(inputs[name]) for name in INPUT_NAMES]
    results = jax.jit(run)(jnp.asarray(segment_ids), tuple(map(jnp.asarray, cotangents)), *arrays)
    names = (*hard_inputs.OUTPUT_NAMES, *hard_inputs.GRADIENT_NAMES)
    got = {name: np.asarray(x) for name, x in zip(names, results, strict=True)}
    got = hard_inputs.add_decay_rate_gradient(got, inputs["g"])
    return {name: hard_inputs.relative_rms(got[name], want[name]) for name in ALL_NAMES}


def _row(scope: str, backend: str, number: int) -> dict:
    start = time.monotonic()
    case = cases_of(scope, backend)[number]
    contents = contents_of(number, case, scope)
    choice = describe_backend(case.dtype, backend=backend, chunk_size=case.chunk_size)
    worst = measure(case, contents, backend=backend)
    limits = LIMITS[choice.precision]
    row = dataclasses.asdict(case) | {
        "precision": choice.precision,
        "contents": len(contents),
        "worst": [dataclasses.asdict(x) | {"limit": limits[x.name]} for x in worst],
        "passed": all(x.error <= limits[x.name] for x in worst),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(f"{case}: {'ok' if row['passed'] else 'FAILED'}, {row['seconds']} s", flush=True)
    return row


def _table(report: dict) -> str:
    """The worst of all cases, a line for each output and gradient."""
    lines = [
        f"{len(report['rows'])} shapes, {report['runs']} runs, {report['platform']}, "
        f"jax {report['jax']}, {report['date']}: `{report['command']}`",
        "",
        "| | dtype, precision | worst relative RMS | limit | where |",
        "|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        rows = [row for row in report["rows"] if row["dtype"] == dtype]
        for place, name in enumerate(ALL_NAMES):
            row = max(rows, key=lambda row: row["worst"][place]["error"])
            worst, shape = row["worst"][place], Shape(**row["shape"])
            lines.append(
                f"| {name} | {dtype}, {row['precision']} | {worst['error']:.1e} "
                f"| {worst['limit']:.1e} | {shape}, chunk {row['chunk_size']}, "
                f"{worst['content']} |"
            )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m atomic_kernels.accuracy")
    parser.add_argument("--scope", choices=("quick", "pairs", "full"), default="pairs")
    parser.add_argument("--backend", choices=tuple(CHUNK_SIZES), default="xla")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for accuracy*.json and accuracy*.md")
    options = parser.parse_args(arguments)
    row = functools.partial(_row, options.scope, options.backend)
    numbers = range(len(cases_of(options.scope, options.backend)))
    if options.workers == 1:
        rows = [row(number) for number in numbers]
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, context) as pool:
            rows = list(pool.map(row, numbers))
    report = {
        "command": f"python -m atomic_kernels.accuracy --scope {options.scope}"
        + (f" --backend {options.backend}" if options.backend != "xla" else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": f"{jax.default_backend()} ({platform.machine()})",
        "jax": jax.__version__,
        "runs": sum(row["contents"] for row in rows),
        "rows": rows,
    }
    print(_table(report))
    if options.output:
        name = "accuracy" if options.backend == "xla" else f"accuracy_{options.backend}"
        write_text(options.output / f"{name}.json", json.dumps(report, indent=1) + "\n")
        write_text(options.output / f"{name}.md", _table(report))
    return 0 if all(row["passed"] for row in rows) else 1


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name, flushed to the disk, and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
