# SPDX-License-Identifier: Apache-2.0
"""Depth routing through TPU kernels: the function of `routing.py`, its backward pass rearranged.

A site's backward pass does not add to its sources' gradients. It leaves, for each source, what
that source will need (`Slot`), and when all sites of a source are done, one kernel reads their
gradients once, and what reached the source by each other way, and forms the source's own. Under
automatic differentiation this is arranged with slots that are zeros in the forward pass, where
nothing uses them (the compiler removes them), and whose cotangents carry the three arrays back:

    open_slots(value, weights of its sites)  -> values, one slot a site  backward: kernel
    read_slots(slots, weight, values)        -> r, forward: kernel       backward: fills the slots
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from atomic_kernels.depth_routing import read_sources, row_products, source_gradients

from atomic_lib.model.depth import DepthPlan, Source
from atomic_lib.model.routing import SCOPE, Site

Array = jax.Array


class Slot(NamedTuple):
    """What one site leaves for one of its sources, as cotangents."""

    read_gradient: Array  # [N, D], dr of the site
    share: Array  # [N] float32, the site's share of this source
    correction: Array  # [N] float32, dr . r


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def open_slots(
    value: Array, weights: Array, other_uses: int, epsilon: float, interpret: bool = False
) -> tuple[tuple[Array, ...], tuple[Slot, ...]]:
    """A source [N, D] once for each use that is not a read, and its slots, zeros, one for each of
    its sites' weights [m, D]."""
    numbers = jnp.zeros(value.shape[:1], jnp.float32)
    slot = Slot(jnp.zeros_like(value), numbers, numbers)
    return (value,) * other_uses, (slot,) * weights.shape[0]


def _open_forward(value: Array, weights: Array, other_uses: int, epsilon: float, interpret: bool):
    return open_slots(value, weights, other_uses, epsilon, interpret), (value, weights)


# The two jitted functions below are traced and lowered once for all sites (sources) with equally
# many sources (sites): about ten kernels instead of 34 each. A jitted function keeps no name scope
# of its caller, so the scope is inside.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _open_backward(other_uses: int, epsilon: float, interpret: bool, saved, gradients):
    del other_uses
    (value, weights), (direct, slots) = saved, gradients
    with jax.named_scope(SCOPE):
        return source_gradients(
            value,
            direct,
            weights,
            jnp.stack([slot.share for slot in slots]),
            jnp.stack([slot.correction for slot in slots]),
            [slot.read_gradient for slot in slots],
            epsilon=epsilon,
            interpret=interpret,
        )


open_slots.defvjp(_open_forward, _open_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def read_slots(
    slots: tuple[Slot, ...],
    weight: Array,
    values: tuple[Array, ...],
    epsilon: float,
    interpret: bool = False,
) -> Array:
    """What a site with weight [D] reads from n sources [N, D]; gradients go into slots alone."""
    return _read_forward(slots, weight, values, epsilon, interpret)[0]


def _read_forward(slots, weight, values, epsilon, interpret):
    del slots
    read, shares = _read_kernel(weight, values, epsilon, interpret)
    return read, (read, shares)


@partial(jax.jit, static_argnums=(2, 3))
def _read_kernel(weight, values, epsilon, interpret):
    with jax.named_scope(SCOPE):
        return read_sources(weight, values, epsilon=epsilon, interpret=interpret)


@partial(jax.jit, static_argnums=2)
def _row_products(a, b, interpret):
    with jax.named_scope(SCOPE):
        return row_products(a, b, interpret=interpret)


def _read_backward(epsilon, interpret, saved, d_read: Array):
    read, shares = saved
    correction = _row_products(d_read, read, interpret)
    return tuple(Slot(d_read, share, correction) for share in shares), None, None


read_slots.defvjp(_read_forward, _read_backward)


class TpuDepthLedger:
    """`routing.DepthLedger` on a TPU; the hidden size must be a multiple of 128."""

    def __init__(
        self,
        plan: DepthPlan,
        weights: dict[Site, Array],
        *,
        epsilon: float,
        interpret: bool = False,
    ):
        self._plan = plan
        self._weights = weights
        self._options = (epsilon, interpret)
        self._values: dict[Source, Array] = {}
        self._slots: dict[tuple[Source, Site], Slot] = {}

    def add(self, source: Source, value: Array, *, other_uses: int) -> tuple[Array, ...]:
        """Takes a source [B, T, D] at the moment it is produced; returns it once for each use that
        is not a read."""
        sites = self._plan.consumers(source)
        if not sites:
            return (value,) * other_uses
        with jax.named_scope(SCOPE):
            rows = value.reshape(-1, value.shape[-1])  # [N, D]
            weights = jnp.stack([self._weights[site] for site in sites])
            kept, slots = open_slots(rows, weights, other_uses, *self._options)
        # What a site does to a source goes through its slot alone.
        self._values[source] = jax.lax.stop_gradient(value)
        for site, slot in zip(sites, slots, strict=True):
            self._slots[source, site] = slot
        return tuple(rows.reshape(value.shape) for rows in kept)

    def read(self, site: Site) -> Array | None:
        """Returns r [B, T, D] of the site (block, slot), or None where it reads nothing."""
        block, number = site
        sources = self._plan.reads[block][number]
        if not sources:
            return None
        with jax.named_scope(SCOPE):
            shape = self._values[sources[0]].shape
            read = read_slots(
                tuple(self._slots[source, site] for source in sources),
                jax.lax.stop_gradient(self._weights[site]),
                tuple(self._values[source].reshape(-1, shape[-1]) for source in sources),
                *self._options,
            )
            return read.reshape(shape)
