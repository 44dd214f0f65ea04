# SPDX-License-Identifier: Apache-2.0
"""Checks that need no reference: what the operation must do with itself.

Causality: outputs up to a token are the same bits whatever follows it. A form that looks ahead,
if only for a common factor of its exponents, fails it.
Split: a run cut in two, the state handed over, is the whole run up to rounding. A state kept in
bfloat16, or decay that is lost at an edge, fails it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from atomic_kernels.gdn2 import gdn2
from atomic_kernels.hard_inputs import Content, Shape, make_inputs, relative_rms

# Hard where a form that looks ahead or behind would show: strong and mixed decay, keys that point
# the same way, erase gates up to 2.
IDENTITY_CONTENTS = tuple(
    Content(decay=decay, keys=keys, erase_bound=erase_bound, segments="one")
    for decay, keys, erase_bound in (
        ("mild", "random", 1.0),
        ("spikes", "random", 2.0),
        ("mixed", "correlated 0.9", 2.0),
        ("zero", "identical", 1.0),
    )
)


def causality_rows(
    shape: Shape,
    cuts: Sequence[int],
    *,
    dtype: jax.typing.DTypeLike = "float32",
    contents: Sequence[Content] = IDENTITY_CONTENTS,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row a cut and content: is o[: cut] the same, bit by bit, under two futures?

    Tokens from `cut` on are replaced by others (other seed, and a spike of -1736 nats at the cut,
    the strongest pull on anything that looks ahead). options go to `gdn2`. Raises ValueError for a
    cut outside 1 .. T - 1.
    """
    _require_cuts(cuts, shape.length)
    arrays, _ = make_inputs(shape, tuple(contents), dtype, seed=0)
    others, _ = make_inputs(shape, tuple(contents), dtype, seed=1)
    run = _jitted(options)
    before = np.asarray(run(arrays)[0], np.float32)
    rows = []
    for cut in cuts:
        changed = {
            name: array
            if name == "initial_state"
            else np.concatenate([array[:, :cut], others[name][:, cut:]], 1)
            for name, array in arrays.items()
        }
        changed["g"][:, cut] = -1736.0
        after = np.asarray(run(changed)[0], np.float32)
        for element, content in enumerate(contents):
            same = before[element, :cut] == after[element, :cut]
            rows.append(
                {
                    "check": "causality",
                    "content": str(content),
                    "cut": cut,
                    "tokens that differ": int((~same.all(axis=(1, 2))).sum()),
                    "future changed": bool((before[element, cut:] != after[element, cut:]).any()),
                    "passed": bool(same.all()),
                }
            )
    return rows


def split_rows(
    shape: Shape,
    cuts: Sequence[int],
    *,
    limit: float,
    dtype: jax.typing.DTypeLike = "float32",
    contents: Sequence[Content] = IDENTITY_CONTENTS,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row a cut and content: relative RMS of o and state, run in two parts against whole.

    limit is the accuracy that the precision promises (kernels and precisions differ). options go
    to `gdn2`. Raises ValueError for a cut outside 1 .. T - 1.
    """
    _require_cuts(cuts, shape.length)
    arrays, _ = make_inputs(shape, tuple(contents), dtype, seed=0)
    run = _jitted(options)
    whole_o, whole_state = (np.asarray(x, np.float64) for x in run(arrays))
    rows = []
    for cut in cuts:
        first_o, state = run(_tokens(arrays, slice(0, cut), arrays["initial_state"]))
        second_o, state = run(_tokens(arrays, slice(cut, None), state))
        o = np.concatenate([np.asarray(first_o), np.asarray(second_o)], 1)
        errors = {
            "o": relative_rms(o, whole_o),
            "state": relative_rms(np.asarray(state), whole_state),
        }
        for element, content in enumerate(contents):
            found = {name: float(error[element]) for name, error in errors.items()}
            rows.append(
                {
                    "check": "split",
                    "content": str(content),
                    "cut": cut,
                    **{f"error of {name}": error for name, error in found.items()},
                    "limit": limit,
                    "passed": max(found.values()) <= limit,
                }
            )
    return rows


def _jitted(options: dict[str, Any]):
    @jax.jit
    def run(arrays):
        inputs = [arrays[name] for name in ("q", "k", "v", "g", "b", "w")]
        return gdn2(*inputs, initial_state=arrays["initial_state"], **options)

    return run


def _tokens(arrays: dict[str, np.ndarray], part: slice, state: Any) -> dict[str, Any]:
    tokens = {name: array[:, part] for name, array in arrays.items() if name != "initial_state"}
    return {**tokens, "initial_state": state}


def _require_cuts(cuts: Sequence[int], length: int) -> None:
    for cut in cuts:
        if not 0 < cut < length:
            raise ValueError(f"cuts: {cut} is outside 1 .. {length - 1} for {length} tokens")
