# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one sealed run, and a way to open runs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_runs import make_run, open_run

from atomic_lib.evidence import RunFolder


@pytest.fixture(scope="session")
def original_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sealed run that no test may change."""
    return make_run(tmp_path_factory.mktemp("original"))


@pytest.fixture
def sealed_run(original_run: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(original_run, tmp_path / "outputs" / original_run.name))


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """Opens runs in a temporary root."""

    def new(name: str = "train-smoke") -> RunFolder:
        return open_run(tmp_path, name)

    return new
