# SPDX-License-Identifier: Apache-2.0
"""The audit's accuracy table passes an exact operation and keeps the rows of an inexact one.

Oracle: the float64 token loop (hard_inputs.oracle). The operation under test here is the float32
token loop, which must meet the f32 limit, and versions of it with a known fault of known size.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from atomic_kernels import accuracy as measurement
from atomic_kernels.audit import accuracy
from atomic_kernels.gdn2 import gdn2
from atomic_kernels.hard_inputs import ALL_NAMES, Shape

SHAPE = Shape(length=40, key_size=16, value_size=8, group=2)
CONTENTS = (*accuracy.EASY_CONTENTS[:1], *accuracy.HARD_CONTENTS[:1])


def rows(**options):
    options = {"backend": "reference", "precision": "f32", "contents": CONTENTS, **options}
    return list(accuracy.accuracy_rows(SHAPE, **options))


def test_every_output_and_gradient_has_a_row_and_the_token_loop_passes():
    table = rows()
    assert [row["quantity"] for row in table] == [*ALL_NAMES] * len(CONTENTS)
    assert [row["hard"] for row in table] == [False] * len(ALL_NAMES) + [True] * len(ALL_NAMES)
    assert [row for row in table if not row["passed"]] == []
    assert all(0 < row["relative RMS"] < 2e-5 for row in table)  # float32, not float64


def test_a_gradient_that_is_wrong_by_a_thousandth_stays_in_the_table(monkeypatch):
    @jax.custom_vjp
    def scaled(w):
        return w

    scaled.defvjp(lambda w: (w, None), lambda _, d: (d * 1.001,))

    def faulty(q, k, v, g, b, w, **options):
        return gdn2(q, k, v, g, b, scaled(w), **options)

    monkeypatch.setattr(measurement, "gdn2", faulty)
    failed = [row for row in rows() if not row["passed"]]
    assert [row["quantity"] for row in failed] == ["dw"] * len(CONTENTS)
    assert all(row["relative RMS"] == pytest.approx(1e-3, rel=0.1) for row in failed)


def test_a_result_that_is_not_finite_fails_with_an_infinite_error(monkeypatch):
    def broken(*inputs, **options):
        o, state = gdn2(*inputs, **options)
        return o * np.nan, state

    monkeypatch.setattr(measurement, "gdn2", broken)
    assert all(
        row["relative RMS"] == np.inf and not row["passed"]
        for row in rows()
        if row["quantity"] == "o"
    )


def test_limits_name_every_quantity_for_every_precision():
    assert set(measurement.LIMITS) == {"bf16", "bf16x3", "f32"}
    assert all(set(limits) == set(ALL_NAMES) for limits in measurement.LIMITS.values())


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision: 'fp8' is none of"):
        rows(precision="fp8")
