# SPDX-License-Identifier: Apache-2.0
"""The audit's times are medians of awaited calls after warm-up, and a skip says what it needs.

Oracle: a clock driven by the test, so that each call's time is known; counts of calls.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from atomic_kernels.audit import timing

# The token loop compiles fastest; the chunked backend is timed the same way.
BACKENDS = ("tpu", "reference")
SHAPE = jax.ShapeDtypeStruct((4, 8), np.float32)


def test_times_are_those_of_the_clock_and_warmups_are_not_timed():
    # Calls of 1, 2, 3, 10 and 4 ms.
    ticks = iter([0.0, 1e-3, 0.0, 2e-3, 0.0, 3e-3, 0.0, 10e-3, 0.0, 4e-3])
    program = (lambda x: x + 1, (SHAPE,))
    measured = timing.time_program(program, repeats=5, clock=lambda: next(ticks))
    assert measured.milliseconds == pytest.approx((1.0, 2.0, 3.0, 10.0, 4.0))
    assert measured.median_ms == pytest.approx(3.0)
    assert measured.quartiles_ms == pytest.approx((2.0, 4.0))
    assert next(ticks, None) is None


def test_results_are_awaited_inside_the_timed_part(monkeypatch):
    events = []
    wait = jax.block_until_ready
    monkeypatch.setattr(
        timing.jax, "block_until_ready", lambda x: (events.append("awaited"), wait(x))[1]
    )
    counter = itertools.count()
    timing.time_program(
        (lambda x: x * 2, (SHAPE,)),
        repeats=2,
        warmups=1,
        clock=lambda: (events.append("clock"), float(next(counter)))[1],
    )
    assert events == ["awaited", "clock", "awaited", "clock", "clock", "awaited", "clock"]


def test_no_repeats_are_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match="repeats: 0 timed calls"):
        timing.time_program((None, None), repeats=0)


def test_inputs_keep_the_contract():
    shapes = [jax.ShapeDtypeStruct((2, 5, 3, 16), np.float32)] * 6
    q, k, _v, g, b, w = timing.random_arguments(shapes)
    assert (g < 0).all()
    assert all(((x >= 0) & (x <= 1)).all() for x in (b, w))
    assert np.linalg.norm(k, axis=-1).mean() == pytest.approx(1.0, abs=0.2)
    assert q.dtype == np.float32


def test_rows_time_what_can_run_here_and_say_what_the_rest_needs():
    rows = list(timing.timing_rows(B=1, T=32, H=1, K=16, repeats=2, backends=BACKENDS))
    assert [(row["backend"], row["direction"]) for row in rows] == [
        ("tpu", "forward"), ("tpu", "training"), ("reference", "forward"),
        ("reference", "training"),
    ]  # fmt: skip
    measured = [row for row in rows if row["skipped"] is None]
    assert all(row["median ms"] > 0 and row["device"] for row in measured)
    assert {"reference"} <= {row["backend"] for row in measured}
    if jax.default_backend() != "tpu":
        assert [row["skipped"] for row in rows[:2]] == ["needs a TPU; this is cpu"] * 2
        assert "median ms" not in rows[0]
