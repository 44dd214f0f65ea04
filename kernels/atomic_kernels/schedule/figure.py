# SPDX-License-Identifier: Apache-2.0
"""Draws where in a kernel's schedule its units work and where they wait."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomic_kernels.schedule.report import Operation, ScheduleReport, UnitProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the compiler's unit names stand for; others keep their name.
UNIT_LABELS = {
    "MXU": "matrix unit",
    "XLU": "transpose, rotate",
    "VALU": "vector arithmetic",
    "VPOP": "result queues",
    "EUP": "exp, reciprocal",
    "VLOAD": "loads",
    "VLOAD:FILL": "of them fills",
    "VSTORE": "stores",
    "VSTORE:SPILL": "of them spills",
    "SALU": "scalar",
}


def require_matplotlib() -> None:
    """Raises RuntimeError with the command that installs matplotlib where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError(
            "this figure needs matplotlib, which atomic_kernels does not depend on: install it "
            f"with `{sys.executable} -m pip install matplotlib`."
        )


def unit_figure(report: ScheduleReport, kernel: str | None = None) -> Figure:
    """A figure of unit use over one trip of each kernel's main loop, a panel a kernel.

    kernel picks one by name; without it all Pallas kernels are shown. Each row is a unit, each
    column a slice of the bundles in issue order with the waits for results kept, dark where the
    unit's slots are taken: a light matrix-unit row above a dark store row is a kernel that waits
    on spills. Raises RuntimeError without matplotlib, ValueError when no kernel is there.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    chosen = [item for item in report.kernels if kernel in (None, item.name) and item.profile]
    if not chosen:
        raise ValueError(
            f"kernel: {kernel!r} is none of the Pallas kernels "
            f"{[item.name for item in report.kernels]}: name one of them, or none for all."
        )
    figure = Figure(figsize=(10, 0.9 + 2.7 * len(chosen)), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    for panel, operation in zip(panels, chosen, strict=True):
        assert operation.profile is not None  # chosen above
        _draw_panel(panel, report, operation, operation.profile)
    return figure


def _draw_panel(
    panel: Any, report: ScheduleReport, operation: Operation, profile: UnitProfile
) -> None:
    image = panel.imshow(
        profile.fractions,
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=0.0,
        vmax=1.0,
        extent=(0, profile.bundles, len(profile.units) - 0.5, -0.5),
    )
    means = [sum(row) / len(row) for row in profile.fractions]
    panel.set_yticks(range(len(profile.units)))
    panel.set_yticklabels(
        [
            f"{UNIT_LABELS.get(unit, unit)} {100 * mean:.0f} %"
            for unit, mean in zip(profile.units, means, strict=True)
        ],
        fontsize=8,
    )
    static = report.milliseconds(operation.cycles)
    time = "unknown" if static is None else f"{static:.3f} ms"
    panel.set_title(f"{operation.name} on {report.chip.name}: static time {time}", fontsize=10)
    panel.set_xlabel("bundles of one trip of the main loop, waits included", fontsize=8)
    panel.figure.colorbar(image, ax=panel, label="part of the unit's slots")


def save_unit_figure(report: ScheduleReport, path: str | Path) -> None:
    """Writes `unit_figure(report)` to `path`; the suffix chooses the format."""
    unit_figure(report).savefig(path, dpi=150)
