# SPDX-License-Identifier: Apache-2.0
"""The audit's causality and split checks pass on the operation and catch one that cheats.

Oracle: operations that look one token ahead, or round the state that is handed over, written
here; the check must report exactly those. The chunked XLA backend must pass. Split limit: float32
sums in another order, 1e-5 relative.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from atomic_kernels.audit import identities
from atomic_kernels.gdn2 import gdn2
from atomic_kernels.hard_inputs import Shape

SHAPE = Shape(length=70, key_size=16, value_size=16)
CUTS = (1, 15, 16, 17, 69)
SPLITS = (16, 37)  # at a chunk's edge and inside one; each length is a compile
OPTIONS = {"backend": "xla", "chunk_size": 16, "precision": "f32"}
# The cheats are wrapped around the token loop, which compiles fastest.
PLAIN = {"backend": "reference"}


def test_the_chunked_backend_is_causal_to_the_bit():
    rows = identities.causality_rows(SHAPE, CUTS, **OPTIONS)
    assert len(rows) == len(CUTS) * len(identities.IDENTITY_CONTENTS)
    assert [row for row in rows if not row["passed"]] == []
    assert all(row["future changed"] for row in rows)  # else the check would compare nothing


def test_the_chunked_backend_split_anywhere_is_the_whole_run():
    rows = identities.split_rows(SHAPE, SPLITS, limit=1e-5, **OPTIONS)
    assert [row for row in rows if not row["passed"]] == []
    assert len(rows) == len(SPLITS) * len(identities.IDENTITY_CONTENTS)


def test_an_operation_that_looks_ahead_is_caught(monkeypatch):
    def looking_ahead(q, k, v, g, b, w, **options):
        o, state = gdn2(q, k, v, g, b, w, **options)
        return o.at[:, :-1].add(1e-6 * v[:, 1:]), state

    monkeypatch.setattr(identities, "gdn2", looking_ahead)
    rows = identities.causality_rows(SHAPE, (16,), **PLAIN)
    assert [row["passed"] for row in rows] == [False] * len(rows)
    assert {row["tokens that differ"] for row in rows} == {1}


def test_a_state_handed_over_in_bfloat16_is_caught(monkeypatch):
    def forgetful(q, k, v, g, b, w, *, initial_state, **options):
        rounded = initial_state.astype(jnp.bfloat16).astype(jnp.float32)
        return gdn2(q, k, v, g, b, w, initial_state=rounded, **options)

    monkeypatch.setattr(identities, "gdn2", forgetful)
    rows = identities.split_rows(SHAPE, (16,), limit=1e-5, **PLAIN)
    failed = [row for row in rows if not row["passed"]]
    assert failed
    assert max(row["error of o"] for row in failed) > 1e-4


def test_a_result_that_is_not_finite_fails(monkeypatch):
    def broken(q, k, v, g, b, w, **options):
        o, state = gdn2(q, k, v, g, b, w, **options)
        return o * np.nan, state

    monkeypatch.setattr(identities, "gdn2", broken)
    assert not any(row["passed"] for row in identities.split_rows(SHAPE, (16,), limit=1, **PLAIN))
    assert not any(row["passed"] for row in identities.causality_rows(SHAPE, (16,), **PLAIN))


@pytest.mark.parametrize("cut", [0, 70, -1])
def test_cuts_outside_the_run_are_refused(cut):
    with pytest.raises(ValueError, match=rf"cuts: {cut} is outside 1 \.\. 69"):
        identities.causality_rows(SHAPE, (cut,))
