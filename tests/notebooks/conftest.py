# SPDX-License-Identifier: Apache-2.0
"""A copy of the repository for each test session, so that no test writes into a user's outputs/."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import papermill
import pytest
import yaml

from atomic_lib.evidence import verify

PARTS = ("atomic_lib", "kernels", "notebooks", "params", "requirements.txt")
CELL_SECONDS = 400


@pytest.fixture(scope="session")
def repository(request, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("clone") / "atomic"
    copy.mkdir()
    for name in PARTS:
        source = request.config.rootpath / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="session")
def environment(request, tmp_path_factory) -> dict[str, str]:
    """Of the child processes: on the CPU, with one compilation cache for all of them, compiled as a
    user's are."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(shared / "jax-cache"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONPATH": "",
    }


@pytest.fixture(scope="session")
def run_smoke(repository, environment) -> Callable[..., Path]:
    """run_smoke(name, xla_flags="", **changed): the notebook's smoke run, in nbval, has passed and
    verifies; returns its run folder.

    nbval executes the very cells that a person runs, in the notebook's own folder, after papermill
    has put in the smoke parameters (nbval itself runs a notebook's defaults).
    """

    def run(name: str, xla_flags: str = "", **changed) -> Path:
        (prepared,) = (repository / "notebooks").glob(f"0?_{name}.ipynb")
        parameters = yaml.safe_load((repository / "params" / name / "smoke.yaml").read_text())
        papermill.execute_notebook(
            prepared, prepared, parameters | changed, prepare_only=True, progress_bar=False
        )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax",
             f"--nbval-cell-timeout={CELL_SECONDS}", "--nbval-kernel-name=python3", prepared.name],
            cwd=prepared.parent,
            env=environment | {"XLA_FLAGS": xla_flags},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        folder = repository / "outputs" / f"{name}-smoke"
        assert verify(folder) == []
        return folder

    return run
