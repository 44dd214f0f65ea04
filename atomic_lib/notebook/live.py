# SPDX-License-Identifier: Apache-2.0
"""A loss figure that redraws itself while a notebook trains."""

import time
from collections.abc import Callable

from IPython import get_ipython
from IPython.display import display

from atomic_lib.notebook.display import as_image
from atomic_lib.notebook.figures import Rows, training_curves


class LiveCurves:
    """Redraws one figure in place, at most once every `period_seconds`; used as a callback.

    A notebook keeps one output element however long it trains, because the same display is
    replaced. Nobody watches a headless run (papermill, nbval), so there nothing is drawn.
    """

    def __init__(
        self,
        title: str,
        *,
        period_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.title = title
        self.period_seconds = period_seconds
        self.clock = clock
        self.drawn_at: float | None = None
        self.handle = None

    def __call__(self, rows: Rows) -> None:
        if not _somebody_watches():
            return
        now = self.clock()
        if self.drawn_at is not None and now - self.drawn_at < self.period_seconds:
            return
        self.drawn_at = now
        image = as_image(training_curves(rows, title=self.title))
        if self.handle is None:
            self.handle = display(image, display_id=True)
        else:
            self.handle.update(image)


def _somebody_watches() -> bool:
    """Whether a person's front end runs this cell: only those offer to answer input()."""
    shell = get_ipython()
    return bool(shell and getattr(shell.kernel, "_allow_stdin", False))
