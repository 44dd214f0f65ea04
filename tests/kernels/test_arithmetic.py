# SPDX-License-Identifier: Apache-2.0
"""Protects how operands are rounded and which products of their parts are made.

Oracle: the roundings made here with numpy, their products in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.gdn2.arithmetic import NN, NT, PRECISION_PARTS, TN, Rounding, dot, join
from gdn2_cases import assert_close

SIZE = 64
# Relative, of a whole operand's product: 2^-9 an operand for one part, 2^-17 for two, float32.
LIMITS = {"bf16": 6e-3, "bf16x3": 2e-5, "f32": 1e-6}


def arrays():
    return np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(np.float32)


def parts_of(x, count):
    """x as a sum of `count` bfloat16 numbers, in float64."""
    parts = []
    for _ in range(count):
        parts.append(np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64))
        x = x - parts[-1].astype(np.float32)
    return parts


@pytest.mark.parametrize("by_casts", [False, True])
@pytest.mark.parametrize(("left", "right"), [("coarse", "coarse"), ("fine", "fine"),
                                             ("fine", "coarse")])  # fmt: skip
def test_a_product_keeps_the_parts_above_the_last(left, right, by_casts):
    a, b = arrays()
    rounding = Rounding(parts=1, by_casts=by_casts)
    # Not one jitted program: XLA drops a pair of casts that it sees together.
    operands = getattr(rounding, left)(jnp.asarray(a)), getattr(rounding, right)(jnp.asarray(b))
    counts = [{"coarse": 1, "fine": 2}[kind] for kind in (left, right)]
    exact = [parts_of(x, count) for x, count in zip((a, b), counts, strict=True)]
    want = sum(
        x @ y for i, x in enumerate(exact[0]) for j, y in enumerate(exact[1]) if i + j < max(counts)
    )
    assert [len(x) for x in operands] == counts
    assert_close("product", dot(*operands, NN), want, limit=5e-7)


@pytest.mark.parametrize("precision", PRECISION_PARTS)
@pytest.mark.parametrize("contracted", [NN, NT, TN], ids=["a b", "a bT", "aT b"])
def test_a_precision_is_reached_under_jit(precision, contracted):
    a, b = arrays()
    rounding = Rounding(parts=PRECISION_PARTS[precision])
    got = jax.jit(lambda a, b: dot(rounding.coarse(a), rounding.coarse(b), contracted))(a, b)
    left = a.T if contracted == TN else a
    want = left.astype(np.float64) @ (b.T if contracted == NT else b)
    assert_close("product", got, want, limit=LIMITS[precision])
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert precision == "f32" or error > LIMITS[precision] / 100, "operands were not rounded"


def test_an_operand_stands_for_its_parts():
    x = jnp.asarray(arrays()[0])
    rounding = Rounding(parts=2)
    fine = rounding.fine(x)
    assert_close("three parts", join(fine), np.asarray(x), limit=1e-7)
    assert rounding.coarse(fine) == fine[:2]  # what is split is not split again
    assert len(rounding.fine(x.astype(jnp.bfloat16))) == 1  # bfloat16 is exact
