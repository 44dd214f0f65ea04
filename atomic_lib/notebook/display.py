# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and links in a notebook's output (plain text where there is no notebook)."""

import html
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure


def format_value(value: Any) -> str:
    """Writes a table cell: four significant digits for a float, thousands separated for an int."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) or "–"
    return str(value)


def show_table(rows: Sequence[Mapping[str, Any]], caption: str) -> None:
    """Shows `rows` (all with the first row's keys) as a Markdown table, or that there are none."""
    if not rows:
        display(Markdown(f"**{caption}**: none"))
        return
    names = list(rows[0])
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in names]
    lines = [
        f"**{caption}**\n",
        "| " + " | ".join(names) + " |",
        "|" + "|".join("---:" if right else "---" for right in numeric) + "|",
    ]
    for row in rows:
        cells = [format_value(row.get(name)).replace("|", "\\|") for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    display(Markdown("\n".join(lines)))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def as_image(figure: Figure) -> Image:
    """Renders a figure to a PNG for display; a bare Figure has no notebook representation."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return Image(data=buffer.getvalue())


def show_link(path: Path, text: str) -> None:
    """Shows a link to a file, relative to the notebook's working folder."""
    target = os.path.relpath(path)
    size = Path(path).stat().st_size / 1e6
    display(HTML(f'<a href="{html.escape(target)}">{html.escape(text)}</a> ({size:.2f} MB)'))
