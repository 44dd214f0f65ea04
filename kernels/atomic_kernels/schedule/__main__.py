# SPDX-License-Identifier: Apache-2.0
"""`python -m atomic_kernels.schedule MODULE:FACTORY [name=value ...]`: print a static schedule."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from atomic_kernels.schedule.compiler import (
    ScheduleCompileError,
    ScheduleUnavailableError,
    compile_schedule,
)
from atomic_kernels.schedule.table import report_table


def parse_arguments(pairs: Sequence[str]) -> dict[str, object]:
    """name=value pairs as keyword arguments; a value is JSON, or a string where it is not.

    Raises ValueError for a word without "=".
    """
    values: dict[str, object] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ValueError(f"argument {pair!r} is not name=value")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def main(words: Sequence[str] | None = None) -> int:
    """Compiles the target, prints its table, and writes the JSON or figure asked for."""
    parser = argparse.ArgumentParser(prog="python -m atomic_kernels.schedule", description=__doc__)
    parser.add_argument("target", help="module:factory or file.py:factory -> (function, structs)")
    parser.add_argument("arguments", nargs="*", help="keyword arguments of the factory, name=JSON")
    parser.add_argument("--topology", default="v5e:2x4", help="CHIP:SHAPE (default %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="chips in the mesh (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--figure", metavar="FILE", help="draw unit use over the schedule")
    parser.add_argument("--dump", metavar="FOLDER", help="keep the compiler's texts here")
    options = parser.parse_intermixed_args(words)
    try:
        report = compile_schedule(
            options.target,
            arguments=parse_arguments(options.arguments),
            topology=options.topology,
            devices=options.devices,
            dump_directory=options.dump,
        )
    except (ScheduleCompileError, ScheduleUnavailableError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report_table(report))
    if options.json:
        report.save(options.json)
    if options.figure:
        from atomic_kernels.schedule.figure import save_unit_figure

        save_unit_figure(report, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
