# SPDX-License-Identifier: Apache-2.0
"""Document boundaries inside packed windows."""

from typing import Any


def segment_ids_from_tokens(tokens: Any, separator: int) -> Any:
    """Numbers the documents of each packed row: int32, the shape of tokens [..., T].

    segment[t] = number of separators before t, so a separator still belongs to the document that it
    ends, and the first token after it opens the next one. Rows start at segment 0: a document cut
    by the start of a window is a segment like any other. Pure, for numpy and jax arrays alike
    (inside jit too). Give the same slice as the model reads: tokens[:, :-1] of a [B, T + 1] batch.
    """
    ends = (tokens == separator).astype("int32")
    return (ends.cumsum(axis=-1) - ends).astype("int32")
