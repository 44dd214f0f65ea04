# SPDX-License-Identifier: Apache-2.0
"""What kind of session this is, found in seconds: no driver and no jax is loaded for it."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from atomic_lib.environment.requirements import (
    extras,
    installed_version,
    is_installed,
    unmet_requirements,
)

Host = Literal["kaggle", "colab", "own"]

TPU_FILES = ("accel", "vfio/")  # followed by the chip's number; "vfio/vfio" is no chip
GPU_FILES = ("nvidia",)
HOSTED_FOLDERS: dict[Host, str] = {"kaggle": "kaggle/working", "colab": "content"}
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
PACKAGE_INDEX = ("pypi.org", 443)
NETWORK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One session. Versions are None where the package is not installed.

    libtpu_wanted and cuda_wanted are what the installed jax asks for ("libtpu==0.0.42.*"), None
    where no jax is installed. unmet: lines of requirements.txt. wheels: a folder of attached
    packages, used where the network is off. network is None where nobody needed to know.
    """

    host: Host
    python: str
    tpu_chips: int
    gpus: int
    jax_imported: bool
    jax: str | None
    libtpu: str | None
    libtpu_wanted: str | None
    cuda_plugins: tuple[str, ...]  # that match the installed jax, as "jax-cuda12-plugin"
    unmet: tuple[str, ...]
    network: bool | None
    wheels: str | None
    jax_platforms: str | None  # the variable JAX_PLATFORMS
    tpu_library_path: str | None  # the variable TPU_LIBRARY_PATH

    @property
    def accelerator(self) -> Literal["tpu", "gpu", "none"]:
        """What this machine computes with."""
        return "tpu" if self.tpu_chips else "gpu" if self.gpus else "none"

    def lines(self) -> list[str]:
        """The facts as a notebook prints them."""
        names = {"kaggle": "Kaggle session", "colab": "Colab session", "own": "own machine"}
        found = {
            "tpu": f"{self.tpu_chips} TPU chip{'s' * (self.tpu_chips > 1)}",
            "gpu": f"{self.gpus} GPU{'s' * (self.gpus > 1)}",
            "none": "no accelerator",
        }[self.accelerator]
        packages = [f"jax {self.jax or 'missing'}"]
        if self.tpu_chips:
            wanted = f" (jax asks for {self.libtpu_wanted})" if self.libtpu_wanted else ""
            packages.append(f"libtpu {self.libtpu or 'missing'}{wanted}")
        if self.accelerator == "gpu":
            packages.append(" and ".join(self.cuda_plugins) or "no CUDA plugin of this jax")
        lines = [f"{names[self.host]}, Python {self.python}, {found}", ", ".join(packages)]
        if self.unmet:
            network = {True: "on", False: "off", None: "not tried"}[self.network]
            wheels = f", packages attached in {self.wheels}" if self.wheels else ""
            lines.append(f"not satisfied: {', '.join(self.unmet)}; network {network}{wheels}")
        return lines


def accelerator_present(device_root: Path = Path("/")) -> bool:
    """Whether this machine shows a TPU or GPU device file. Loads no driver and no jax."""
    return _count(device_root / "dev", TPU_FILES + GPU_FILES) > 0


def gather_facts(
    requirements: Path,
    *,
    device_root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Facts:
    """Looks at this machine; the network is tried only where something has to be installed."""
    devices = device_root / "dev"
    unmet = tuple(unmet_requirements(requirements))
    tpu_extras = {other.name: str(other).split(";")[0] for other in extras(Requirement("jax[tpu]"))}
    plugins = [
        name
        for name in CUDA_PLUGINS
        if installed_version(name) is not None
        and all(
            is_installed(other)
            for other in extras(Requirement(f"jax[{name.split('-')[1]}]"))
            if other.name == name
        )
    ]
    host, gpus = _host(device_root), _count(devices, GPU_FILES)
    something_missing = bool(unmet) or bool(gpus and not plugins)
    return Facts(
        host=host,
        python=platform.python_version(),
        tpu_chips=_count(devices, TPU_FILES),
        gpus=gpus,
        jax_imported="jax" in sys.modules,
        jax=installed_version("jax"),
        libtpu=installed_version("libtpu"),
        libtpu_wanted=tpu_extras.get("libtpu"),
        cuda_plugins=tuple(plugins),
        unmet=unmet,
        network=_reaches_index() if something_missing and host != "own" else None,
        wheels=_attached_wheels(device_root),
        jax_platforms=environment.get("JAX_PLATFORMS"),
        tpu_library_path=environment.get("TPU_LIBRARY_PATH"),
    )


def _count(devices: Path, prefixes: tuple[str, ...]) -> int:
    """How many numbered device files have one of these names."""
    pattern = re.compile(rf"({'|'.join(prefixes)})\d+")
    found = [*devices.glob("*"), *devices.glob("vfio/*")]
    return sum(bool(pattern.fullmatch(file.relative_to(devices).as_posix())) for file in found)


def _host(device_root: Path) -> Host:
    for host, folder in HOSTED_FOLDERS.items():
        if (device_root / folder).is_dir():
            return host
    return "own"


def _attached_wheels(device_root: Path) -> str | None:
    inputs = device_root / "kaggle" / "input"
    for pattern in ("*/*.whl", "*/*/*.whl", "datasets/*/*/*.whl", "datasets/*/*/*/*.whl"):
        for wheel in sorted(inputs.glob(pattern)):
            return str(wheel.parent)
    return None


def _reaches_index() -> bool:
    try:
        with socket.create_connection(PACKAGE_INDEX, timeout=NETWORK_SECONDS):
            return True
    except OSError:
        return False
