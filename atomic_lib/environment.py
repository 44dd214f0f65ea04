# SPDX-License-Identifier: Apache-2.0
"""What must hold on a machine before the first `import jax`: packages, platform, libtpu.

Standard library and `packaging` only. jax reads its environment variables and loads libtpu once,
at its first use, so everything here has to happen earlier.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ACCELERATOR_FILES = ("/dev/accel0", "/dev/vfio/0", "/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")
COMPILATION_CACHE = ".cache/jax"
HOSTED_NOTEBOOKS = ("/kaggle/working", "/content")


def accelerator_present(device_root: Path = Path("/")) -> bool:
    """Whether this machine shows a TPU or GPU device file. Loads no driver and no jax."""
    return any((device_root / name.lstrip("/")).exists() for name in ACCELERATOR_FILES)


def unmet_requirements(requirements: Path) -> list[str]:
    """Returns the lines of a requirements file that the installed packages do not satisfy.

    `jax[tpu]` also asks for the libtpu that jax's own metadata names: a Kaggle image may hold
    another one, and jax would load it.
    """
    lines = [line.split(" #")[0].strip() for line in requirements.read_text().splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    unmet = []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate():
            continue
        if not _is_installed(requirement) or not all(map(_is_installed, _extras(requirement))):
            unmet.append(str(requirement))
    return unmet


def _is_installed(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _extras(requirement: Requirement) -> list[Requirement]:
    if not requirement.extras or not _is_installed(Requirement(requirement.name)):
        return []
    own = [Requirement(line) for line in metadata.requires(requirement.name) or []]
    return [
        other
        for other in own
        for extra in requirement.extras
        if other.marker and other.marker.evaluate({"extra": extra}) and _names_extra(other)
    ]


def _names_extra(requirement: Requirement) -> bool:
    return "extra" in str(requirement.marker)


def prepare_environment(root: Path) -> list[str]:
    """Makes this process ready for `import jax`; returns what was installed.

    On Kaggle and Colab it installs what requirements.txt asks for and the image lacks (nothing
    that already matches is touched). Elsewhere it refuses with the command to run. Without an
    accelerator it sets JAX_PLATFORMS=cpu, because an installed libtpu would print start-up errors.
    Compiled programs are kept in the root's .cache/jax, so that a notebook does not compile again
    what an earlier one or an earlier session has compiled. What is already set stays.

    Raises RuntimeError if packages are missing, or have to change after jax was imported.
    """
    unmet = unmet_requirements(Path(root) / "requirements.txt")
    if unmet:
        hosted = any(Path(folder).is_dir() for folder in HOSTED_NOTEBOOKS)
        if not hosted:
            raise RuntimeError(
                f"this Python ({sys.executable}) lacks {', '.join(unmet)}; run `make run` once in "
                "the repository's root, or `pip install -r requirements.txt`"
            )
        if "jax" in sys.modules:
            raise RuntimeError(
                f"{', '.join(unmet)} must be installed before jax is imported: restart the kernel "
                "and run the first cell first"
            )
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *unmet], check=True)
    if not accelerator_present():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.access(root, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(root) / COMPILATION_CACHE))
    return unmet
