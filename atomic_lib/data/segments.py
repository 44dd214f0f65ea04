# SPDX-License-Identifier: Apache-2.0
"""Document boundaries inside packed windows.

Where a run keeps documents apart, each token of a window sees only its own document, and the first
token of a document is no target: nothing that it could be predicted from is visible. So a packed
document gives every target the loss that the document alone would give it.
"""

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


def targets_inside_documents(tokens: Any, separator: int) -> Any:
    """Which targets of a batch are predicted from their own document: bool [..., T].

    tokens [..., T + 1], inputs and their next tokens. A target after a separator begins a document.
    """
    return tokens[..., :-1] != separator
