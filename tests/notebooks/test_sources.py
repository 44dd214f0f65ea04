# SPDX-License-Identifier: Apache-2.0
"""Protects: notebooks stay thin, paired with their source, and start from wherever they are opened.

Notebooks are read as data here (no kernel). The source of truth is the .py file: the .ipynb must
have the same cells, tags and kernelspec, no stored output above 200 kB and no path of one machine.
"""

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

from atomic_lib.config import NOTEBOOK_CONFIGS, TrainConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
MAX_CODE_CELLS, MAX_CELL_LINES, MAX_OUTPUT_BYTES = 15, 12, 200_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?!kaggle\b|content\b)(?:[\w.-]+/)+[\w.-]+")

each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def code_cells(source: Path) -> list:
    return [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]


def parameters_cell(source: Path) -> str:
    tagged = [c for c in code_cells(source) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1, f"{source.name} has {len(tagged)} parameters cells"
    return tagged[0].source


def notebook_name(source: Path) -> str:
    return source.stem.split("_", 1)[1]


def test_the_notebooks_are_the_ones_that_have_parameters():
    assert [notebook_name(source) for source in SOURCES] == list(NOTEBOOK_CONFIGS)


def test_the_training_notebooks_differ_in_their_name_and_parameters_alone():
    """So that the smoke runs of two of them speak for all."""
    cells = {}
    for source in SOURCES:
        name = notebook_name(source)
        if NOTEBOOK_CONFIGS[name] is TrainConfig:
            names = ast.parse(parameters_cell(source)).body
            cells[name] = [
                [node.target.id for node in names],
                *(
                    cell.source.replace(f'"{name}"', '"train"')
                    for cell in code_cells(source)
                    if "parameters" not in cell.metadata.get("tags", [])
                ),
            ]
    assert len(cells) == 3
    for name, found in cells.items():
        assert found == cells["train"], name


@each_source
def test_the_pair_has_the_cells_of_its_source(source):
    written = jupytext.read(source)
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    describe = lambda cell: (cell.cell_type, cell.source, cell.metadata.get("tags", []))  # noqa: E731
    assert list(map(describe, paired.cells)) == list(map(describe, written.cells)), (
        "run `make notebooks`"
    )
    assert paired.metadata.kernelspec.name == written.metadata.kernelspec.name == "python3"
    nbformat.validate(paired)


@each_source
def test_stored_outputs_are_small_and_name_no_machine(source):
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    for cell in paired.cells:
        for output in cell.get("outputs", []):
            assert len(str(output)) < MAX_OUTPUT_BYTES
            assert not ABSOLUTE_PATH.search(str(output))
    assert not ABSOLUTE_PATH.search(source.read_text())


@each_source
def test_cells_are_thin(source):
    cells = code_cells(source)
    assert len(cells) <= MAX_CODE_CELLS
    for cell in cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        is_parameters = "parameters" in cell.metadata.get("tags", [])
        assert is_parameters or len(lines) <= MAX_CELL_LINES, cell.source
        for node in ast.walk(ast.parse(cell.source)):
            loop_or_definition = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While)
            assert not isinstance(node, loop_or_definition), cell.source


@each_source
def test_it_opens_with_a_title_and_what_it_needs(source):
    opening = jupytext.read(source).cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    for row in ("needs", "wall time", "quota", "inputs", "outputs"):
        assert f"| {row} |" in opening.source, f"{source.name}: no row {row!r}"


@each_source
def test_parameters_are_annotated_explained_and_known(source):
    text = parameters_cell(source)
    known = {field.name for field in dataclasses.fields(NOTEBOOK_CONFIGS[notebook_name(source)])}
    lines = text.splitlines()
    for node in ast.parse(text).body:
        assert isinstance(node, ast.AnnAssign), ast.unparse(node)
        assert node.target.id in known
        assert "#" in lines[node.lineno - 1], f"{node.target.id} has no explanation"
        expected = "smoke" if node.target.id == "run" else None
        assert ast.literal_eval(node.value) == expected, "defaults live in the parameter file"


@pytest.mark.parametrize("place", ["root", "notebooks", "above", "kaggle"])
def test_the_first_cell_finds_the_repository(place, tmp_path):
    repository = tmp_path / "working" / "atomic"
    shutil.copytree(ROOT / "atomic_lib", repository / "atomic_lib")
    shutil.copytree(ROOT / "kernels", repository / "kernels")
    shutil.copy(ROOT / "requirements.txt", repository)
    (repository / "notebooks").mkdir()
    folders = {
        "root": repository,
        "notebooks": repository / "notebooks",
        "above": repository.parent,
        "kaggle": tmp_path / "elsewhere",
    }
    folders["kaggle"].mkdir()
    first = code_cells(SOURCES[0])[0].source
    first = first.replace('"/kaggle/input"', repr(str(repository.parent)))
    first += "\nprint(root.resolve(), session.root.resolve())"
    shown = subprocess.run(
        [sys.executable, "-c", first],
        cwd=folders[place],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert shown.split()[-2:] == [str(repository)] * 2


def test_the_first_cell_is_the_same_everywhere_and_says_when_it_finds_nothing(tmp_path):
    assert len({code_cells(source)[0].source for source in SOURCES}) == 1
    done = subprocess.run(
        [sys.executable, "-c", code_cells(SOURCES[0])[0].source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no atomic_lib at, above or just below" in done.stderr
