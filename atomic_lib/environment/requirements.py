# SPDX-License-Identifier: Apache-2.0
"""Which lines of a requirements file the installed packages do not satisfy."""

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


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
        if not is_installed(requirement) or not all(map(is_installed, extras(requirement))):
            unmet.append(str(requirement))
    return unmet


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_installed(requirement: Requirement) -> bool:
    """Whether the named distribution is there in a version that the requirement allows."""
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def extras(requirement: Requirement) -> list[Requirement]:
    """What the extras of a requirement ask for, by the installed package's own metadata."""
    if not requirement.extras or not is_installed(Requirement(requirement.name)):
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
