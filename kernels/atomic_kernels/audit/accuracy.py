# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the operation against the float64 recurrence, every output and gradient by name.

The oracle and the limits are those of `atomic_kernels.accuracy`. Rows that miss a limit stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from atomic_kernels.accuracy import LIMITS, relative_errors
from atomic_kernels.hard_inputs import ALL_NAMES, Content, Shape

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
    errors = relative_errors(shape, tuple(contents), dtype, precision=precision, **options)
    for element, content in enumerate(contents):
        for name in ALL_NAMES:
            limit = LIMITS[precision][name]
            error = float(errors[name][element])
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
