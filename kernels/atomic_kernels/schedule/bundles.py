# SPDX-License-Identifier: Apache-2.0
"""Reads the TPU compiler's text dumps of one kernel: bundles, loops and units.

A bundle is what the core issues in one cycle. Three texts describe a kernel:
  bundles    one line a bundle, `0x1f LB: > { op ;; op }`; LB marks a loop's first bundle, a
             loop closes with `sbr.rel (!%p) target = $regionN` back to its body region N,
  listing    the same program as nested regions, where `loop: start=0, step=1, limit=22`
             precedes a counted loop and `// DoWhile loop` one whose count is not known,
  units      one row a bundle: the slots of each unit that the bundle keeps busy.
Static cycles = sum over bundles of the product of the trip counts of the loops around it. Every
predicated region is counted as taken, so the cycles are an upper bound on issued bundles; stalls
on memory transfers are in none of these texts, so as a time they are a lower bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# One bundle: address, optional label, loop depth as a run of ">", then the operations.
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s*((?:[A-Z]{2}\s*)*):\s*(>*)\s*\{(.*)$")
# "target = $region28" in final bundles, "target bundleno = 42 (0x2a), region = 28" before them.
_BRANCH = re.compile(r"sbr\.rel\b[^;]*?target (?:bundleno = [^;]*?region = |= \$region)(\d+)")
_REGION = re.compile(r"^\s*\$region(\d+):.*//\s*loop_body")
_COUNTED = re.compile(r"^\s*loop: start=(\S+), step=(\S+), limit=(\S+)")
_UNCOUNTED = re.compile(r"^\s*// DoWhile loop")

# Bundles issued after a branch before it takes effect. In every v5e and v6e dump read so far a
# branch is followed by four bundles that are empty or belong to the branch's own region.
BRANCH_DELAY_SLOTS = 4

# A pipelined grid of n steps runs n + 2 trips: step i + 1 is fetched and step i - 1 written back
# while step i computes. Its index is annotated with the stage it serves.
PIPELINE_FILL = 2
_PIPELINED = "iteration index, stage = "


class ScheduleFormatError(RuntimeError):
    """The dump does not look as this reader expects: another compiler version, most likely."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop: bundles [start, stop), nesting depth from 1, trips None where not known.

    fill counts the trips that only start the first or finish the last transfers of a pipelined
    grid: they issue the loop's bundles but skip the kernel's body.
    """

    start: int
    stop: int
    depth: int
    region: int
    trips: int | None
    fill: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One issued bundle: loop depth as printed (0 outside), and its operations as text."""

    depth: int
    opens_loop: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """Slots of each unit that are busy in each bundle: rows[bundle][unit], and the capacity."""

    units: tuple[str, ...]
    capacity: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


def parse_bundles(text: str) -> tuple[Bundle, ...]:
    """The bundles of a `*-final_bundles.txt` (or `*-packed-bundles-*.txt`) dump, in order.

    Raises ScheduleFormatError when the text holds no bundle or skips an address.
    """
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            if bundles and line.strip():  # window descriptions of a transfer span several lines
                last = bundles[-1]
                bundles[-1] = Bundle(
                    depth=last.depth, opens_loop=last.opens_loop, text=last.text + "\n" + line
                )
            continue
        address, labels, depth, operations = match.groups()
        if int(address, 0) != len(bundles):
            raise ScheduleFormatError(
                f"bundle address {address} where {len(bundles):#x} was expected: a bundle line "
                "was not recognised. Report the libtpu version; this reader needs an update."
            )
        bundles.append(Bundle(depth=len(depth), opens_loop="LB" in labels.split(), text=operations))
    if not bundles:
        raise ScheduleFormatError("no bundle line in the dump: is it a final_bundles text?")
    return tuple(bundles)


def parse_loop_regions(listing: str) -> dict[int, int | None]:
    """Trip count by loop body region, from the region listing of the same kernel.

    None where the compiler does not know the count (a while loop, or bounds from memory).
    """
    trips: dict[int, int | None] = {}
    pending: list[int | None] = []
    for line in listing.splitlines():
        counted = _COUNTED.match(line)
        if counted:
            pending.append(_trip_count(*counted.groups()))
        elif _UNCOUNTED.match(line):
            pending.append(None)
        elif pending and (body := _REGION.match(line)):
            trips[int(body.group(1))] = pending.pop()
    return trips


def _trip_count(start: str, step: str, limit: str) -> int | None:
    """Iterations of a counted loop, None unless all three bounds are literal integers."""
    try:
        first, stride, last = int(start, 0), int(step, 0), int(limit, 0)
    except ValueError:
        return None
    if stride <= 0:
        return None
    return max(0, -(-(last - first) // stride))


def find_loops(
    bundles: tuple[Bundle, ...], region_trips: dict[int, int | None]
) -> tuple[Loop, ...]:
    """The loops of a schedule, outermost first, each with its trip count.

    A loop starts at its LB bundle and ends with the branch back to its body region; the bundles
    in that branch's delay slots still belong to it. Raises ScheduleFormatError when a loop has
    no branch back.
    """
    loops: list[Loop] = []
    opened: list[int] = []
    for index, bundle in enumerate(bundles):
        if bundle.opens_loop:
            opened.append(index)
        for region in map(int, _BRANCH.findall(bundle.text)):
            if region not in region_trips or not opened:
                continue
            start = opened.pop()
            depth = len(opened) + 1
            loops.append(
                Loop(
                    start=start,
                    # The branch takes effect after its delay slots: they run each iteration.
                    stop=min(index + 1 + BRANCH_DELAY_SLOTS, len(bundles)),
                    depth=depth,
                    region=region,
                    trips=region_trips[region],
                    fill=PIPELINE_FILL if _PIPELINED in bundles[start].text else 0,
                )
            )
    if opened:
        raise ScheduleFormatError(
            f"{len(opened)} loop(s), one of them from bundle {opened[-1]:#x}, lack a branch back "
            "to a loop body region: report the libtpu version; this reader needs an update."
        )
    return tuple(sorted(loops, key=lambda loop: (loop.start, -loop.stop)))


def bundle_weights(
    count: int,
    loops: tuple[Loop, ...],
    *,
    unknown_as: int | None = None,
    without_fill: bool = False,
) -> list[int | None]:
    """Times each bundle issues: the product of the trip counts around it.

    A bundle in a loop of unknown count weighs None, or `unknown_as` times the rest when given
    (1 gives a lower bound: a loop whose test is at its end runs at least once). without_fill
    leaves out the trips that only fill or drain a pipelined grid.
    """
    weights: list[int | None] = [1] * count
    for loop in loops:
        trips = unknown_as if loop.trips is None else loop.trips
        if without_fill and trips is not None:
            trips = max(0, trips - loop.fill)
        for index in range(loop.start, loop.stop):
            weight = weights[index]
            weights[index] = None if weight is None or trips is None else weight * trips
    return weights


def parse_units(text: str) -> UnitTable:
    """The unit table of a `*-static-per-bundle-utilization.txt` dump.

    Raises ScheduleFormatError when the header or a row has another shape.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 4 or not lines[0].startswith("==") or not lines[3].startswith("=="):
        raise ScheduleFormatError("unit table without its CAPACITY and UTILIZATION headers")
    units = tuple(name.strip() for name in lines[1].split(","))
    capacity = tuple(int(value) for value in lines[2].split())
    rows = tuple(tuple(int(value) for value in line.split()) for line in lines[4:])
    if len(capacity) != len(units) or any(len(row) != len(units) for row in rows):
        raise ScheduleFormatError(f"unit table rows do not match the {len(units)} units {units}")
    return UnitTable(units=units, capacity=capacity, rows=rows)
