# SPDX-License-Identifier: Apache-2.0
"""Where each token of a call stands: its position, its segment, whether it is padding.

Inside the model padding is always at the end of a row. A mask with padding elsewhere is turned into
that form by moving the real tokens of each row to its front (`move_real_tokens_first`), and the
result is moved back, so that padding is a no-op for states, convolutions and caches alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class TokenContext(NamedTuple):
    """What the mixers need to know about the tokens of one call.

    positions [B, T] int32: position in the row since the state was new. first_visible [B, T] int32:
    the earliest position that each token may look back to, or None if that is 0 everywhere.
    segment_ids [B, T] int32 or None. valid [B, T] bool or None: False for the padding that ends a
    row. lengths [B] int32 or None: valid tokens of each row.
    """

    positions: Array
    first_visible: Array | None
    segment_ids: Array | None
    valid: Array | None
    lengths: Array | None


class Placement(NamedTuple):
    """How the real tokens of each row were moved to its front.

    tokens, segment_ids [B, T] in the new order (segment_ids may be None); valid [B, T]; lengths
    [B]; back [B, T] int32, the index in the new order of each original place.
    """

    tokens: Array
    segment_ids: Array | None
    valid: Array
    lengths: Array
    back: Array


def move_real_tokens_first(tokens: Array, segment_ids: Array | None, mask: Array) -> Placement:
    """Moves the tokens with `mask` [B, T] True to the front of each row, keeping their order."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    if segment_ids is not None:
        segment_ids = jnp.take_along_axis(segment_ids, order, axis=1)
        # Padding joins the last real segment; a segment of its own would restart the state.
        last = jnp.maximum(lengths - 1, 0)[:, None]
        segment_ids = jnp.where(valid, segment_ids, jnp.take_along_axis(segment_ids, last, axis=1))
    return Placement(
        tokens=jnp.take_along_axis(tokens, order, axis=1),
        segment_ids=segment_ids,
        valid=valid,
        lengths=lengths,
        back=jnp.argsort(order, axis=1),
    )


def _segment_starts(segment_ids: Array, positions: Array, first_start: Array) -> Array:
    """Position at which each token's segment began, [B, T]; `first_start` [B] for the first one."""
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = jnp.where(begins, positions, first_start[:, None])
    return jax.lax.cummax(starts, axis=1)


def make_context(
    shape: tuple[int, ...],
    *,
    segment_ids: Array | None,
    placement: Placement | None,
    start: tuple[Array, Array] | None,
) -> TokenContext:
    """Builds the context of a call on [B, T] tokens.

    `start` is (position [B], segment_start [B]) of the state that the call continues, or None.
    """
    batch, length = shape
    zeros = jnp.zeros((batch,), jnp.int32)
    position, segment_start = start if start is not None else (zeros, zeros)
    positions = position[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    first_visible = None
    if segment_ids is not None:
        first_visible = _segment_starts(segment_ids, positions, segment_start)
    elif start is not None:
        first_visible = jnp.broadcast_to(segment_start[:, None], shape)
    return TokenContext(
        positions=positions,
        first_visible=first_visible,
        segment_ids=segment_ids,
        valid=None if placement is None else placement.valid,
        lengths=None if placement is None else placement.lengths,
    )


def advance(start: tuple[Array, Array], context: TokenContext) -> tuple[Array, Array]:
    """Returns (position, segment_start) after the call."""
    position, segment_start = start
    if context.first_visible is None:
        return position + context.positions.shape[1], segment_start
    if context.lengths is None:
        return position + context.positions.shape[1], context.first_visible[:, -1]
    last = jnp.maximum(context.lengths - 1, 0)[:, None]
    latest = jnp.take_along_axis(context.first_visible, last, axis=1)[:, 0]
    # A row of padding alone leaves everything as it was.
    return position + context.lengths, jnp.where(context.lengths > 0, latest, segment_start)
