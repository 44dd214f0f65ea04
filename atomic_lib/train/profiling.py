# SPDX-License-Identifier: Apache-2.0
"""A trace of a few training steps by JAX's profiler, for TensorBoard's or XProf's viewer."""

from pathlib import Path

import jax


class ProfileWindow:
    """Traces steps `first` to `last` (both included, counted from 1) into `folder`.

    The device must be idle when `begin` and `end` are called, so that the trace holds whole steps.
    """

    def __init__(self, steps: tuple[int, ...] | None, folder: Path):
        self.first, self.last = steps or (0, 0)
        self.folder = folder
        self.active = False

    def begins_at(self, step: int) -> bool:
        """Whether the trace must begin before `step` is dispatched."""
        return not self.active and step == self.first

    def ends_at(self, step: int) -> bool:
        """Whether `step` is the last one of the trace."""
        return self.active and step >= self.last

    def begin(self) -> None:
        """Starts the trace."""
        jax.profiler.start_trace(self.folder)
        self.active = True

    def end(self) -> None:
        """Writes the trace; does nothing if none has begun."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()
