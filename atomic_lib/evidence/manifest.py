# SPDX-License-Identifier: Apache-2.0
"""What a run was made from: parameters, source, packages, machine, inputs. manifest.json."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from atomic_lib.evidence.files import input_digest
from atomic_lib.evidence.verify import sha256_bytes, sha256_file

MANIFEST_SCHEMA = "atomic-manifest/1"
SOURCE_FOLDERS = ("atomic_lib", "kernels", "notebooks", "params")
SOURCE_SUFFIXES = (".py", ".yaml", ".toml")
SOURCE_METHOD = "sha256 of the lines 'sha256  path' of the files below, sorted by path"
# What changes how jax compiles and runs; nothing else of the environment is recorded.
ENVIRONMENT_NAMES = (
    "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_COMPILATION_CACHE_DIR",
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG",
)  # fmt: skip
GIT_SECONDS = 20.0  # `git status` of a cold checkout on a network disk takes seconds


def utc_now() -> str:
    """The time as evidence files write it: ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def build_manifest(
    *,
    run_id: str,
    notebook: str,
    parameters: Mapping[str, Any],
    origins: Mapping[str, str],
    root: Path,
    started_at: str,
) -> dict[str, Any]:
    """Everything about a run that is known before jax is imported.

    `parameters` are the resolved values, `origins` says of each "default", "file" or "override".
    Raises ValueError if a parameter has no origin.
    """
    missing = sorted(set(parameters) - set(origins))
    if missing:
        raise ValueError(f"origins: no origin for {', '.join(missing)}; give one to each parameter")
    return {
        "schema": MANIFEST_SCHEMA,
        "run_id": run_id,
        "notebook": notebook,
        "started_at": started_at,
        "parameters": dict(parameters),
        "origins": dict(origins),
        "seeds": {name: value for name, value in parameters.items() if name.endswith("seed")},
        "budget_seconds": parameters.get("budget_seconds"),
        "git": git_state(root),
        "source": source_tree(root),
        "python": platform.python_version(),
        "platform": {
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "memory_bytes": memory_bytes(),
        },
        "packages": installed_packages(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT_NAMES if name in os.environ},
        "devices": None,
        "inputs": [],
    }


def git_state(root: Path) -> dict[str, Any]:
    """{"commit": ..., "dirty": ...}; both None where `root` is not a git checkout of its own."""
    if not (Path(root) / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=GIT_SECONDS
    ).stdout.strip()


def source_tree(root: Path) -> dict[str, Any]:
    """sha256 of each source file under `root` and of their list: the identity without git."""
    files = {}
    for folder in SOURCE_FOLDERS:
        for path in sorted((Path(root) / folder).rglob("*")):
            relative = path.relative_to(root)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and path.suffix in SOURCE_SUFFIXES and not hidden:
                files[relative.as_posix()] = sha256_file(path)
    listing = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    digest = sha256_bytes(listing.encode())
    return {"sha256": digest, "method": SOURCE_METHOD, "files": files}


def installed_packages() -> dict[str, str]:
    """Name and version of every installed distribution, as pip would list them."""
    # Reading .metadata parses a file each time, so once a distribution.
    facts = [distribution.metadata for distribution in metadata.distributions()]
    found = {fact["Name"]: fact["Version"] for fact in facts if "Name" in fact}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def memory_bytes() -> int | None:
    """Main memory of the machine, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def device_facts() -> dict[str, Any]:
    """What jax runs on: versions installed, the platform version *loaded*, and every device.

    Imports jax and starts its backend.
    """
    import jax
    import jaxlib

    devices = jax.devices()
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "libtpu": installed_packages().get("libtpu"),
        "backend": jax.default_backend(),
        "platform_version": devices[0].client.platform_version,
        "process_count": jax.process_count(),
        "devices": [
            {"id": d.id, "kind": d.device_kind, "process": d.process_index} for d in devices
        ],
    }


def input_record(path: Path, root: Path) -> dict[str, Any]:
    """Path (relative to `root` where it lies inside), size and digest of one input file."""
    path = Path(path).resolve()
    method, digest = input_digest(path)
    inside = path.is_relative_to(Path(root).resolve())
    shown = path.relative_to(Path(root).resolve()) if inside else path
    return {
        "path": shown.as_posix(),
        "bytes": path.stat().st_size,
        "method": method,
        "digest": digest,
    }
