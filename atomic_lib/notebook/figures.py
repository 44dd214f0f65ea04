# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: pure functions from metric rows to a matplotlib Figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# One colour a quantity or architecture, in every figure of the suite (Okabe-Ito: safe for
# colour-blind readers).
COLOURS = {
    "train": "#0072B2",
    "validation": "#D55E00",
    "rate": "#009E73",
    "baseline": "#56B4E9",
    "hybrid": "#CC79A7",
}
Rows = Sequence[Mapping[str, Any]]


def _column(rows: Rows, kind: str, name: str) -> tuple[list[float], list[float]]:
    chosen = [row for row in rows if row["kind"] == kind and row.get(name) is not None]
    return [row["tokens"] for row in chosen], [row[name] for row in chosen]


def training_curves(rows: Rows, *, title: str) -> Figure:
    """Loss (nats a token) of training and validation above the learning rate, against tokens."""
    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss_axes.plot(*_column(rows, "train", "loss"), color=COLOURS["train"], lw=1, label="training")
    loss_axes.plot(
        *_column(rows, "eval", "ce"), "o-", color=COLOURS["validation"], ms=4, label="validation"
    )
    loss_axes.set(title=title, ylabel="cross-entropy (nats/token)")
    loss_axes.legend(frameon=False)
    rate_axes.plot(*_column(rows, "train", "lr"), color=COLOURS["rate"])
    rate_axes.set(xlabel="training tokens", ylabel="learning rate")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (loss_axes, rate_axes):
        _plain(axes)
    return figure


def learning_curves(curves: Mapping[str, Mapping[str, Rows]], *, measure: str) -> Figure:
    """Validation `measure` ("bpb_est" or "bpb_exact") against tokens, one line a run.

    `curves` maps an architecture to its runs, and each run's name to its metric rows.
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for architecture, runs in curves.items():
        for number, (name, rows) in enumerate(runs.items()):
            style = ("-", "--", ":", "-.")[number % 4]
            colour = COLOURS[architecture]
            axes.plot(*_column(rows, "eval", measure), f"o{style}", color=colour, ms=4, label=name)
    axes.set(xlabel="training tokens", ylabel=f"validation bits per byte ({measure})")
    axes.legend(frameon=False)
    _plain(axes)
    return figure


def position_curves(evaluation: Mapping[str, Any]) -> Figure:
    """Mean loss (nats a token) at each position of the window, one line a model.

    `evaluation` is the content of evaluation.json with positions.
    """
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for model in evaluation["models"]:
        losses = model["position_nats"]
        axes.plot(range(1, len(losses) + 1), losses, lw=1, label=model["run_id"])
    axes.set(xscale="log", xlabel="tokens of context", ylabel="cross-entropy (nats/token)")
    axes.legend(frameon=False)
    _plain(axes)
    return figure


def accuracy_figure(accuracy: Mapping[str, Any]) -> Figure:
    """Error of each input and quantity beside its limit, a panel a precision, logarithmic.

    `accuracy` is the content of accuracy.json. Inputs that miss their limit are drawn as crosses.
    """
    rows = accuracy["rows"]
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    figure = Figure(figsize=(3.2 * len(precisions), 4.0), layout="constrained")
    panels = figure.subplots(1, len(precisions), sharey=True, squeeze=False)[0]
    for axes, precision in zip(panels, precisions, strict=True):
        for row in (row for row in rows if row["precision"] == precision):
            place = quantities.index(row["quantity"])
            colour = COLOURS["validation" if row["hard"] else "train"]
            error = row["relative RMS"]
            if error:  # an exact zero has no place on a logarithmic axis
                axes.plot(error, place, "o" if row["passed"] else "x", color=colour, ms=4)
            axes.plot(row["limit"], place, "|", color="black", ms=14)
        axes.set(xscale="log", title=precision, xlabel="relative RMS error")
        _plain(axes)
    panels[0].set_yticks(range(len(quantities)), quantities)
    panels[0].invert_yaxis()
    figure.suptitle("blue: easy inputs; orange: hard inputs; bar: limit", fontsize=9)
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
