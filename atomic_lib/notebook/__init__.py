# SPDX-License-Identifier: Apache-2.0
"""What the cells of a notebook call besides the library itself: its start, tables and figures.

session    the first cells: repository, parameters, run folder
display    tables, images, links
panels     one panel a result
figures    metric rows to figures; `live`: the one that redraws itself
"""

from atomic_lib.notebook.display import show_table
from atomic_lib.notebook.figures import (
    accuracy_figure,
    learning_curves,
    position_curves,
    training_curves,
)
from atomic_lib.notebook.live import LiveCurves
from atomic_lib.notebook.panels import show_dataset, show_figure, show_manifest, show_model
from atomic_lib.notebook.session import Session, offer_zip

__all__ = [
    "LiveCurves",
    "Session",
    "accuracy_figure",
    "learning_curves",
    "offer_zip",
    "position_curves",
    "show_dataset",
    "show_figure",
    "show_manifest",
    "show_model",
    "show_table",
    "training_curves",
]
