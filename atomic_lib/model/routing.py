# SPDX-License-Identifier: Apache-2.0
"""Depth routing: what a sublayer reads from the changes that earlier sublayers made.

At one token, with sources v_1 .. v_n [D], a query z [D] and a key scale c [D] of the site:

    s_j = z . (c * v_j) / sqrt(mean(v_j^2) + epsilon)
    a = softmax(s),   r = sum_j a_j v_j

z starts at 0, so r starts as the mean of the sources. Norm, softmax and sum are float32; sources
and r have the compute dtype, and the products z c v are formed in it with a float32 sum.

Sources are never stacked. When one is produced, its scores at all later sites come from one matrix
product (`source_scores`), which also reads the source only once for its norm; a site then needs its
own scores alone and one pass over its sources (`read_sources`). Both have exact vector-Jacobian
products, written out so that the backward pass keeps the sources themselves and no float32 copies:

    dv_j += a_j dr,   ds_j = a_j (dr . v_j - sum_i a_i dr . v_i)
    dv += rho (W^T ds) - v rho^2 (ds . s) / D,   dW = (rho ds) v^T
    where rho = 1 / sqrt(mean(v^2) + epsilon) and W holds z * c of the sites that read v

Source of the equations: Atomic-GDN2's hierarchical routing, after arXiv 2605.18855.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.depth import DepthPlan, Source

Array = jax.Array
Site = tuple[int, int]

# The name by which a compiled step is read: atomic_lib.aot counts what carries it as routing.
SCOPE = "depth_routing"


def _inverse_rms(value: Array, epsilon: float) -> Array:
    # [B, T]
    return jax.lax.rsqrt(jnp.mean(jnp.square(value.astype(jnp.float32)), axis=-1) + epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def source_scores(value: Array, weights: Array, epsilon: float) -> Array:
    """Scores of one source at N sites.

    value [B, T, D]; weights [N, D] float32, each row query * key scale. Returns [N, B, T] float32.
    """
    return _scores_forward(value, weights, epsilon)[0]


def _scores_forward(value: Array, weights: Array, epsilon: float):
    inverse = _inverse_rms(value, epsilon)
    products = jnp.einsum(
        "btd,nd->nbt", value, weights.astype(value.dtype), preferred_element_type=jnp.float32
    )
    scores = products * inverse
    return scores, (value, weights, scores, inverse)


def _scores_backward(epsilon: float, saved, d_scores: Array):
    del epsilon
    value, weights, scores, inverse = saved
    # [N, B, T]; in the compute dtype, so that both products below run at its speed.
    d_products = (d_scores * inverse).astype(value.dtype)
    d_value = jnp.einsum("nbt,nd->btd", d_products, weights.astype(value.dtype),
                         preferred_element_type=jnp.float32)  # fmt: skip
    # [B, T]; the norm's share, along the source itself.
    along = jnp.sum(d_scores * scores, axis=0) * jnp.square(inverse) / value.shape[-1]
    d_value = d_value - along[..., None] * value.astype(jnp.float32)
    d_weights = jnp.einsum("nbt,btd->nd", d_products, value, preferred_element_type=jnp.float32)
    return d_value.astype(value.dtype), d_weights


source_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def read_sources(scores: tuple[Array, ...], values: tuple[Array, ...]) -> Array:
    """Reads n >= 1 sources: sum_j softmax(scores)_j values_j.

    scores n x [B, T] float32; values n x [B, T, D]. Returns [B, T, D] in the values' dtype.
    """
    return _read_forward(scores, values)[0]


def _read_forward(scores: tuple[Array, ...], values: tuple[Array, ...]):
    # [n, B, T]
    shares = jax.nn.softmax(jnp.stack(scores), axis=0)
    total = jnp.zeros(values[0].shape, jnp.float32)
    for share, value in zip(shares, values, strict=True):
        total = total + share[..., None] * value.astype(jnp.float32)
    return total.astype(values[0].dtype), (shares, values)


def _read_backward(saved, d_read: Array):
    shares, values = saved
    wide = d_read.astype(jnp.float32)
    # [n, B, T]
    products = jnp.stack([jnp.sum(wide * value.astype(jnp.float32), axis=-1) for value in values])
    d_scores = shares * (products - jnp.sum(shares * products, axis=0))
    d_values = tuple((share[..., None] * wide).astype(d_read.dtype) for share in shares)
    return tuple(d_scores), d_values


read_sources.defvjp(_read_forward, _read_backward)


def block_summary(deltas: list[Array]) -> Array:
    """Sum of a block's deltas [B, T, D], formed in float32 and returned in their dtype."""
    with jax.named_scope(SCOPE):
        total = deltas[0].astype(jnp.float32)
        for delta in deltas[1:]:
            total = total + delta.astype(jnp.float32)
        return total.astype(deltas[0].dtype)


class DepthRoute(nnx.Module):
    """The parameters of one site: query (zeros) and key scale (ones); 2 D parameters."""

    def __init__(self, size: int):
        self.query = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.key_scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def weights(self) -> Array:
        """query * key scale [D] float32: what a normalised source is multiplied with."""
        return self.query[...] * self.key_scale[...]


class DepthLedger:
    """Holds the sources and scores of one forward pass while it is traced.

    `weights` gives query * key scale [D] for each site that reads anything.
    """

    def __init__(self, plan: DepthPlan, weights: dict[Site, Array], *, epsilon: float):
        self._plan = plan
        self._weights = weights
        self._epsilon = epsilon
        self._values: dict[Source, Array] = {}
        self._scores: dict[tuple[Source, Site], Array] = {}

    def add(self, source: Source, value: Array, *, other_uses: int) -> tuple[Array, ...]:
        """Takes a source [B, T, D] at the moment it is produced; returns it once for each use that
        is not a read."""
        kept = (value,) * other_uses
        sites = self._plan.consumers(source)
        if not sites:
            return kept
        self._values[source] = value
        with jax.named_scope(SCOPE):
            stacked = jnp.stack([self._weights[site] for site in sites])
            scores = source_scores(value, stacked, self._epsilon)
            for index, site in enumerate(sites):
                self._scores[source, site] = scores[index]
        return kept

    def read(self, site: Site) -> Array | None:
        """Returns r [B, T, D] of the site (block, slot), or None where it reads nothing."""
        block, slot = site
        sources = self._plan.reads[block][slot]
        if not sources:
            return None
        scores = tuple(self._scores[source, site] for source in sources)
        with jax.named_scope(SCOPE):
            return read_sources(scores, tuple(self._values[source] for source in sources))
