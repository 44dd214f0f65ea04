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
    """Of the child processes: on the CPU, with one compilation cache for all of them.

    Little optimisation of machine code, as in the other tests, but the code generator that users
    have: with the older one, which those take where there is one, a model's outputs change in the
    last bit with later tokens, and preflight refuses that.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "JAX_COMPILATION_CACHE_DIR": str(shared / "jax-cache"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONPATH": "",
    }
