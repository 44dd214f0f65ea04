# SPDX-License-Identifier: Apache-2.0
"""One writer a run folder. The system drops the lock when the process ends, however it ends."""

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no POSIX locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
# POSIX locks belong to the process and go when any descriptor of the file is closed, so each
# file is opened once, and closed only to give the folder back.
_descriptors: dict[Path, int] = {}


def lock_folder(folder: Path) -> None:
    """Claims a run folder for this process until it ends; claiming again does nothing.

    Raises RuntimeError naming the process that has it. File systems without locks are let pass.
    """
    path = (Path(folder) / LOCK).resolve()
    if fcntl is None or path in _descriptors:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise RuntimeError(
            f"{folder} is being written by process {owner or 'unknown'}; wait for it, stop it, "
            "or give this run another name"
        ) from None
    except OSError:
        os.close(descriptor)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    _descriptors[path] = descriptor


def unlock_folder(folder: Path) -> None:
    """Gives a run folder back: an idle notebook must not keep others from a finished run."""
    descriptor = _descriptors.pop((Path(folder) / LOCK).resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def locked_by(folder: Path) -> str:
    """The process that has claimed a run folder, as text, or "" if none has."""
    path = (Path(folder) / LOCK).resolve()
    if path in _descriptors:
        return str(os.getpid())
    if fcntl is None or not path.exists():
        return ""
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return file.read(32).decode(errors="replace").strip() or "unknown"
        except OSError:
            return ""
    return ""
