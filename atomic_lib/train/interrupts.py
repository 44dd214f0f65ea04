# SPDX-License-Identifier: Apache-2.0
"""Turns SIGTERM and SIGINT into a request to stop at the next step."""

import signal
import threading
from types import FrameType
from typing import Any


class TrainingInterrupted(RuntimeError):
    """Training was asked to stop before its end; a checkpoint has been saved."""


class StopSignals:
    """While active, the first SIGTERM or SIGINT only sets `requested` to its name.

    A second one does what it did before. Outside the main thread, where Python lets nobody handle
    signals, it does nothing.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.requested: str | None = None
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._earlier:
            number, handler = self._earlier.popitem()
            signal.signal(number, handler)
