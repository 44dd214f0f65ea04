# SPDX-License-Identifier: Apache-2.0
"""The child process: papermill, which starts the notebook's kernel."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

import psutil

from atomic_lib.environment import accelerator_present
from atomic_lib.evidence.verify import NOTEBOOK
from atomic_lib.run.jobs import Job

# Log noise of the libraries below jax; errors still come through.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "GLOG_minloglevel": "2",
    "GRPC_VERBOSITY": "ERROR",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TQDM_MININTERVAL": "30",
}
KERNEL_MODULE = "ipykernel_launcher"
AUTOSAVE_SECONDS = 30  # how old the saved notebook may be when everything dies


def child_environment(job: Job, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the notebook: packages on the path, jax on the CPU if nothing else is
    there, quiet logs. What is already set stays."""
    environment = {**QUIET, **inherited}
    if not accelerator_present():
        # With libtpu installed and no TPU, jax would spend its start-up looking for one.
        environment.setdefault("JAX_PLATFORMS", "cpu")
    # A kernel named python3 in the user's home may belong to another Python: ours comes first.
    environment.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    paths = [str(job.root), inherited.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


class NotebookProcess:
    """A running papermill and, below it, the notebook's kernel."""

    def __init__(self, job: Job, *, log: IO[bytes], environment: Mapping[str, str]):
        """Starts it, in a process group of its own, so that Ctrl-C reaches only this process."""
        command = [
            sys.executable, "-m", "papermill", str(job.notebook_file), str(job.folder / NOTEBOOK),
            "--parameters_file", str(job.parameter_file), "--parameters_raw", "run", job.run,
            "--kernel", "python3", "--language", "python", "--cwd", str(job.root),
            "--no-progress-bar", "--autosave-cell-every", str(AUTOSAVE_SECONDS),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            cwd=job.root,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._family: dict[int, psutil.Process] = {}

    def poll(self) -> int | None:
        """papermill's exit code, or None while it runs."""
        self._remember_family()
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to the kernel: a training cell checkpoints and ends, another one dies."""
        self._remember_family()
        for process in self._family.values():
            if _is_kernel(process):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills papermill, the kernel and everything that they started, and waits for papermill."""
        self._remember_family()
        if self._process.poll() is None:
            self._process.kill()
        for process in self._family.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _remember_family(self) -> None:
        """Descendants are found through their parents, so they are noted while those live."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                self._family.setdefault(process.pid, process)


def _is_kernel(process: psutil.Process) -> bool:
    try:
        return process.is_running() and KERNEL_MODULE in process.cmdline()
    except psutil.Error:
        return False
