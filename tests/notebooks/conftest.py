# SPDX-License-Identifier: Apache-2.0
"""A copy of the repository for each test session, so that no test writes into a user's outputs/."""

import os
import shutil
from pathlib import Path

import pytest

PARTS = ("atomic_lib", "kernels", "notebooks", "params", "requirements.txt")


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
