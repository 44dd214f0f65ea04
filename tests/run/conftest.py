# SPDX-License-Identifier: Apache-2.0
"""Fixture: the tiny repository, as the runner sees it."""

from pathlib import Path

import pytest
from tiny_repository import REPOSITORY, write_notebook

from atomic_lib.run.jobs import Roots


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roots:
    """A repository with notebooks/00_tiny.ipynb; its kernels find this repository's packages."""
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path / "notebooks" / "00_tiny.ipynb")
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'kernels'}")
    return Roots.of(tmp_path)
