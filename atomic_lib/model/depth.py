# SPDX-License-Identifier: Apache-2.0
"""Which earlier changes each sublayer may read: the static plan of depth routing.

A site is one sublayer (block, slot). Reading happens at one token, over depth:

    hierarchical   summaries of all earlier blocks, then this block's earlier deltas
    flat           the deltas of all earlier sublayers
    block          summaries of all earlier blocks only
    none           nothing

A delta is what a sublayer added to the residual stream; a block's summary is the sum of its
deltas, with or without those of its feed-forward layers. The embedding is no source, and no
sublayer reads its own delta. Source of the hierarchical form: models of Atomic-GDN2, after
Delta Attention Residuals (arXiv 2605.18855).
"""

from dataclasses import dataclass

ROUTINGS = ("none", "flat", "block", "hierarchical")


@dataclass(frozen=True, order=True)
class Source:
    """One readable change: the delta of a sublayer, or a block's summary where slot is None."""

    block: int
    slot: int | None = None


@dataclass(frozen=True)
class DepthPlan:
    """Sources of every site, in the order in which they are read.

    `reads[block][slot]` is the tuple of sources of that site; an empty tuple means that the site
    reads nothing and has no parameters.
    """

    reads: tuple[tuple[tuple[Source, ...], ...], ...]

    @property
    def site_count(self) -> int:
        """Sites that read at least one source: each has a query and a key scale."""
        return sum(bool(sources) for block in self.reads for sources in block)

    @property
    def read_count(self) -> int:
        """Source reads of one forward pass over all sites."""
        return sum(len(sources) for block in self.reads for sources in block)

    def consumers(self, source: Source) -> tuple[tuple[int, int], ...]:
        """Returns the sites (block, slot) that read `source`, in the order of the forward pass."""
        return tuple(
            (block, slot)
            for block, sites in enumerate(self.reads)
            for slot, sources in enumerate(sites)
            if source in sources
        )


def _sources_of(routing: str, block: int, slot: int, slots: int) -> tuple[Source, ...]:
    if routing == "none":
        return ()
    if routing == "flat":
        earlier = [Source(b, s) for b in range(block) for s in range(slots)]
        return (*earlier, *(Source(block, s) for s in range(slot)))
    summaries = tuple(Source(b) for b in range(block))
    if routing == "block":
        return summaries
    return (*summaries, *(Source(block, s) for s in range(slot)))


def plan_depth(routing: str, *, num_blocks: int, slots: int) -> DepthPlan:
    """Returns the plan for `num_blocks` blocks of `slots` sublayers each.

    Seven blocks of five give 34 sites and 175 reads (hierarchical), 34 and 595 (flat).
    """
    return DepthPlan(
        tuple(
            tuple(_sources_of(routing, block, slot, slots) for slot in range(slots))
            for block in range(num_blocks)
        )
    )
