# SPDX-License-Identifier: Apache-2.0
"""Compiles a training run for a TPU slice and says whether it fits. No TPU is used.

    python -m atomic_lib.preflight params/train_hybrid/seed1.yaml [--topology v5e-8] [--json FILE]

Exit status: 0 the run fits, 1 it does not, 2 it was refused (bad parameters, no TPU compiler).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from atomic_lib.aot import AotCompileError, AotUnavailableError, CompileReport, compile_report
from atomic_lib.config import PreflightConfig, TrainConfig, load_config
from atomic_lib.notebook.display import format_value

FITS, DOES_NOT_FIT, REFUSED = 0, 1, 2


def read_train_config(parameter_file: Path) -> TrainConfig:
    """The training configuration of params/<notebook>/<run>.yaml.

    A file of the preflight notebook stands for the training file that it names. Raises what
    `load_config` raises, and ValueError for a file that belongs to another notebook.
    """
    path = Path(parameter_file).resolve()
    notebook, root = path.parent.name, path.parent.parent.parent
    config = load_config(notebook, {"run": path.stem}, root=root).config
    if isinstance(config, PreflightConfig):
        notebook, _, run = config.train.partition("/")
        config = load_config(notebook, {"run": run}, root=root).config
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"parameter file {parameter_file} belongs to notebook {notebook!r}, which trains "
            "nothing; give one of params/train_baseline or params/train_hybrid"
        )
    return config


def print_report(report: CompileReport, console: Console) -> None:
    """The report as a table, its basis and the verdict."""
    rows = report.rows()
    table = Table(title=f"{report.preset} on {report.target}", caption=report.basis)
    for name in rows[0]:
        table.add_column(name, justify="right" if name == "value" else "left")
    for row in rows[:-1]:
        table.add_row(*(format_value(value) for value in row.values()))
    console.print(table)
    console.print(f"[bold]{report.verdict}[/bold]")


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m atomic_lib.preflight", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("parameters", type=Path, help="params/<notebook>/<run>.yaml")
    parser.add_argument("--topology", default="v5e-8", help="TPU slice (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = parser.parse_args(words)
    errors = Console(stderr=True)
    try:
        report = compile_report(
            read_train_config(options.parameters),
            topology=options.topology,
            progress=lambda text: errors.print(text, highlight=False, markup=False, soft_wrap=True),
        )
    except (ValueError, TypeError, OSError, AotUnavailableError, AotCompileError) as error:
        errors.print(f"refused: {error}", highlight=False, markup=False, soft_wrap=True)
        return REFUSED
    if options.json:
        report.save(options.json)
    print_report(report, Console())
    return FITS if report.fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
