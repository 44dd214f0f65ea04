# SPDX-License-Identifier: Apache-2.0
"""Segment ids from tokens: compared with literal rows written by hand. Exact."""

import numpy as np
import pytest

from atomic_lib.data import segment_ids_from_tokens

END = 9
CASES = [
    ([1, 2, 3, 4], [0, 0, 0, 0]),
    ([1, END, 3, 4], [0, 0, 1, 1]),
    ([END, END, 1, END], [0, 1, 2, 2]),
    ([1, 2, 3, END], [0, 0, 0, 0]),
    ([END], [0]),
    ([], []),
]


@pytest.mark.parametrize(("tokens", "segments"), CASES, ids=str)
def test_a_separator_belongs_to_the_document_it_ends(tokens, segments):
    got = segment_ids_from_tokens(np.array(tokens, dtype=np.int32), END)
    assert got.dtype == np.int32
    assert got.tolist() == segments


def test_rows_of_a_batch_are_numbered_apart_also_inside_jit():
    import jax

    rows = np.array([tokens for tokens, _ in CASES[:4]], dtype=np.int32)
    want = [segments for _, segments in CASES[:4]]
    assert segment_ids_from_tokens(rows, END).tolist() == want
    got = jax.jit(segment_ids_from_tokens, static_argnums=1)(rows, END)
    assert got.dtype == np.int32
    assert np.asarray(got).tolist() == want
