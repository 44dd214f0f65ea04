# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the operation against the float64 recurrence, every output and gradient by name.

The oracle goes token by token in float64 and shares no code with the chunked backends. Its
inputs are the rounded inputs of the run, so an error is the operation's own. Rows that miss the
limit stay in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from atomic_kernels.gdn2 import gdn2
from atomic_kernels.hard_inputs import (
    ALL_NAMES,
    GRADIENT_NAMES,
    INPUT_NAMES,
    OUTPUT_NAMES,
    Content,
    Shape,
    add_decay_rate_gradient,
    make_cotangents,
    make_inputs,
    oracle,
    relative_rms,
)

# Relative RMS error that each precision promises. bf16 rounds every operand to 8 bits (2e-3 each)
# and the gate gradients sum products of both; bf16x3 keeps 16 bits, f32 24.
_BF16 = {"o": 6e-3, "state": 6e-3, "db": 1.2e-2, "dw": 1.2e-2, "dg": 1.2e-2, "sum dg*g": 1.2e-2}
LIMITS: dict[str, dict[str, float]] = {
    "bf16": {name: _BF16.get(name, 1e-2) for name in ALL_NAMES},
    "bf16x3": dict.fromkeys(ALL_NAMES, 1e-4),
    "f32": dict.fromkeys(ALL_NAMES, 2e-5),
}

EASY_CONTENTS = (
    Content(decay="mild", keys="random", erase_bound=1.0, segments="one"),
    Content(decay="-1e-3", keys="random", erase_bound=1.0, segments="one"),
)
# What trained layers hold and random inputs do not: one-token spikes, decay of 50 nats, keys that
# point the same way, erase gates up to 2, segments shorter than a chunk, all at once.
HARD_CONTENTS = (
    Content(decay="spikes", keys="random", erase_bound=1.0, segments="one"),
    Content(decay="-50", keys="random", erase_bound=2.0, segments="one"),
    Content(decay="mild", keys="correlated 0.5", erase_bound=2.0, segments="one"),
    Content(decay="mild", keys="correlated 0.9", erase_bound=2.0, segments="one"),
    Content(decay="zero", keys="identical", erase_bound=1.0, segments="one"),
    Content(decay="mild", keys="random", erase_bound=1.0, segments="short"),
    Content(decay="mixed", keys="correlated 0.9", erase_bound=2.0, segments="inside"),
)


def accuracy_rows(
    shape: Shape,
    *,
    precision: str,
    dtype: jax.typing.DTypeLike | None = None,
    contents: Sequence[Content] = (*EASY_CONTENTS, *HARD_CONTENTS),
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """One row a content and quantity (o, state, seven gradients, sum of dg*g).

    precision ("bf16", "bf16x3", "f32") sets the limit and, unless `dtype` is given, the inputs:
    bfloat16 for "bf16", float32 otherwise. options go to `gdn2`. A row holds the relative RMS
    error against float64, its limit, whether it passed, and whether the content is one of the
    hard ones; a result that is not finite has an infinite error. Raises ValueError for an unknown
    precision.
    """
    if precision not in LIMITS:
        raise ValueError(f"precision: {precision!r} is none of {sorted(LIMITS)}")
    dtype = dtype or ("bfloat16" if precision == "bf16" else "float32")
    arrays, segment_ids = make_inputs(shape, tuple(contents), dtype)
    cotangents = make_cotangents(shape, len(contents), dtype)
    want = oracle(arrays, segment_ids, cotangents, elements_at_once=len(contents))
    got = _run(arrays, segment_ids, cotangents, {**options, "precision": precision})
    for element, content in enumerate(contents):
        for name in ALL_NAMES:
            limit = LIMITS[precision][name]
            one = slice(element, element + 1)
            error = float(relative_rms(got[name][one], want[name][one])[0])
            yield {
                "content": str(content),
                "hard": content not in EASY_CONTENTS,
                "quantity": name,
                "precision": precision,
                "shape": str(shape),
                "relative RMS": error,
                "limit": limit,
                "passed": error <= limit,
            }


def _run(
    arrays: dict[str, np.ndarray],
    segment_ids: np.ndarray,
    cotangents: tuple[np.ndarray, np.ndarray],
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Outputs and gradients of the operation under test, by name."""

    @jax.jit
    def run(ids: Any, weights: Any, *inputs: Any) -> Any:
        def forward(*inputs: Any) -> Any:
            return gdn2(*inputs[:6], initial_state=inputs[6], segment_ids=ids, **options)

        outputs, pull = jax.vjp(forward, *inputs)
        return *outputs, *pull(weights)

    results = run(segment_ids, cotangents, *(arrays[name] for name in INPUT_NAMES))
    named = dict(zip((*OUTPUT_NAMES, *GRADIENT_NAMES), map(np.asarray, results), strict=True))
    return add_decay_rate_gradient(named, arrays["g"])
