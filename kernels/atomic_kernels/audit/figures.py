# SPDX-License-Identifier: Apache-2.0
"""Figures of the audit. matplotlib is imported only here, when a figure is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atomic_kernels.schedule.figure import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def comparison_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Static times of `schedules.comparison_row` rows as bars, kernels and passes stacked.

    A tick marks the larger floor, bytes or matrix products, of the kernels. A time with loops of
    unknown count is hatched and stands for a lower bound; a line that did not compile is named
    without a bar. Raises RuntimeError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        _draw_line(axes, position, row)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [f"{row['implementation']}, {row['dtype']}, {row['direction']}" for row in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("static time, ms (bundles at the chip's clock; not a measurement)")
    handles = [
        axes.barh([0], [0], color="#4269d0", label="kernels"),
        axes.barh([0], [0], color="#c9b6e8", label="XLA passes around them"),
        axes.barh([0], [0], color="#ffffff", edgecolor="#4269d0", hatch="//", label="at least"),
    ]
    axes.legend(handles=handles, fontsize=8, loc="lower right")
    return figure


def _draw_line(axes: Any, position: int, row: Mapping[str, Any]) -> None:
    if row.get("failure"):
        axes.text(0, position, " did not compile", va="center", fontsize=8)
        return
    if row["static_ms"] is None:
        axes.barh(
            [position], [row["at_least_ms"]], color="#ffffff", edgecolor="#4269d0", hatch="//"
        )
        longest = row["at_least_ms"]
    else:
        axes.barh([position], [row["kernels_ms"]], color="#4269d0")
        axes.barh([position], [row["passes_ms"]], left=row["kernels_ms"], color="#c9b6e8")
        longest = row["static_ms"]
    floor = max(row["byte_floor_ms"], row["matmul_floor_ms"] or 0.0)
    axes.plot([floor, floor], [position - 0.4, position + 0.4], color="#111111", linewidth=1.5)
    axes.text(longest, position, f" {longest:.2f}", va="center", fontsize=8)
