# SPDX-License-Identifier: Apache-2.0
"""Carries out the plan for this session, and checks afterwards which libtpu jax really loaded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from atomic_lib.environment.facts import Facts, gather_facts
from atomic_lib.environment.plan import decide

COMPILATION_CACHE = ".cache/jax"


def prepare_environment(root: Path) -> Facts:
    """Makes this process ready for `import jax`; prints what it found and did.

    On Kaggle and Colab it installs what requirements.txt asks for and the image lacks (nothing
    that already matches is touched). Elsewhere it refuses with the command to run. Compiled
    programs are kept in the root's .cache/jax, so that a notebook does not compile again what an
    earlier one or an earlier session has compiled. Variables that are set stay as they are, but for
    those that the plan names. Raises RuntimeError with what to do if the session cannot go on.
    """
    facts = gather_facts(Path(root) / "requirements.txt")
    print("\n".join(facts.lines()))
    plan = decide(facts)
    for note in plan.notes:
        print(note)
    if plan.refusal is not None:
        raise RuntimeError(plan.refusal)
    if plan.install:
        print(f"installing {' '.join(plan.install)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *plan.install], check=True)
    for name in plan.unset:
        os.environ.pop(name, None)
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    if os.access(root, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(root) / COMPILATION_CACHE))
    return facts


def require_loaded_libtpu() -> None:
    """Raises RuntimeError if this process has mapped another libtpu than the installed package's.

    Package metadata say what is installed, not what was loaded. To be called once jax runs on a
    TPU.
    """
    spec = importlib.util.find_spec("libtpu")
    folders = list(spec.submodule_search_locations or []) if spec else []
    foreign = foreign_libtpu(Path("/proc/self/maps").read_text(), folders)
    if foreign is not None:
        raise RuntimeError(
            f"jax loaded {foreign}, not the libtpu package in {folders or 'this Python'}: unset "
            "TPU_LIBRARY_PATH, restart the kernel and run the first cell first"
        )


def foreign_libtpu(maps: str, folders: list[str]) -> str | None:
    """The libtpu.so among a process's mapped files that lies in none of `folders`, or None.

    maps: the text of /proc/<pid>/maps.
    """
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.endswith("/libtpu.so") and not any(
            Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders
        ):
            return path
    return None
