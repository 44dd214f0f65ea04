# SPDX-License-Identifier: Apache-2.0
"""Protects: a notebook is told what its Python lacks before jax loads, and never upgrades a match.

The oracle is the installed packages' own metadata: a requirement written from it is met, and the
same requirement with another version is not.
"""

import subprocess
import sys
from importlib import metadata

import pytest

from atomic_lib.environment import prepare_environment, unmet_requirements


@pytest.fixture
def requirements(tmp_path):
    def write(*lines):
        (tmp_path / "requirements.txt").write_text("\n".join(lines))
        return tmp_path / "requirements.txt"

    return write


def test_an_installed_version_inside_its_range_is_left_alone(requirements):
    version = metadata.version("numpy")
    assert unmet_requirements(requirements("# a comment", f"numpy=={version}", "numpy>=1")) == []


@pytest.mark.parametrize("line", ["numpy<1", "no-such-package-of-anyone>=1"])
def test_a_missing_or_other_version_is_named(requirements, line):
    assert unmet_requirements(requirements("numpy", line)) == [line]


def test_a_line_for_another_platform_does_not_count(requirements):
    path = requirements('no-such-package-of-anyone; sys_platform == "none"')
    assert unmet_requirements(path) == []


def test_an_extra_asks_for_what_the_package_itself_names(requirements, monkeypatch):
    own = {"jax": ["numpy>=1", 'libtpu==9.9; extra == "tpu"', 'other==1; extra == "cuda"']}
    monkeypatch.setattr(metadata, "requires", lambda name: own[name])
    monkeypatch.setattr(
        metadata, "version", lambda name: {"jax": "0.11.1", "libtpu": "0.0.17"}[name]
    )
    assert unmet_requirements(requirements("jax[tpu]")) == ["jax[tpu]"]
    monkeypatch.setattr(metadata, "version", lambda name: {"jax": "0.11.1", "libtpu": "9.9"}[name])
    assert unmet_requirements(requirements("jax[tpu]")) == []


def test_missing_packages_are_refused_with_the_command_to_run(requirements):
    path = requirements("no-such-package-of-anyone")
    with pytest.raises(RuntimeError, match=r"lacks no-such-package-of-anyone; run `make run`"):
        prepare_environment(path.parent)


def test_the_shipped_requirements_are_met_here_and_looking_loads_no_jax(request):
    code = (
        "import sys; from pathlib import Path; from atomic_lib.environment import *;"
        "unmet = unmet_requirements(Path('requirements.txt')); print(unmet);"
        "sys.exit(bool(unmet) or 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
