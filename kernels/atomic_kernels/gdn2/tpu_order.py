# SPDX-License-Identifier: Apache-2.0
"""The order in which a grid step's heads are written down for the compiler.

Its scheduler fills the bundles from a window around the text's order, so units lie idle where all
heads do the same: while operands are made every head stores, while they are multiplied none does.
With heads some stages apart, one head's stores lie beside another's products. The results are the
same bits in any order.
"""

from collections.abc import Iterable, Iterator

_END = object()


def stagger(programs: Iterable[Iterator[None]], lag: int) -> None:
    """Runs every program to its end, each starting `lag` stages after the one before it.

    A program is a generator that yields between its stages; of those that run, the last to start
    has the next turn.
    """
    waiting = list(programs)
    running: list[Iterator[None]] = []
    turn = 0
    while waiting or running:
        if waiting and turn % lag == 0:
            running.insert(0, waiting.pop(0))
        running = [program for program in running if next(program, _END) is not _END]
        turn += 1
