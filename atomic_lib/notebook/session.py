# SPDX-License-Identifier: Apache-2.0
"""The first cells of every notebook: where the repository is, its parameters, its run folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atomic_lib.config import LoadedConfig, TrainConfig, load_config
from atomic_lib.environment import (
    Facts,
    accelerator_refusal,
    backend_refusal,
    prepare_environment,
    require_loaded_libtpu,
)
from atomic_lib.evidence import RunFolder, zip_run
from atomic_lib.notebook.display import show_link, show_table

# Names that IPython itself puts among a notebook's globals.
IPYTHON_NAMES = ("In", "Out")
PARAMETER_TYPES = (str, bool, int, float, list, tuple, dict, type(None))


@dataclass(frozen=True, kw_only=True)
class Session:
    """One notebook kernel: the repository's root, when its first cell ran (monotonic s), and what
    that cell found here."""

    root: Path
    started_at: float
    facts: Facts
    output_folder: Path | None = None  # where run folders go, if not where they usually go

    @classmethod
    def begin(cls, root: Path) -> "Session":
        """Starts the budget's clock and prepares this process for jax; prints what it found."""
        started_at = time.monotonic()
        return cls(root=Path(root), started_at=started_at, facts=prepare_environment(root))

    @property
    def outputs(self) -> Path:
        """Where run folders go: the repository's outputs/, or here if that is read-only."""
        if self.output_folder is not None:
            return self.output_folder
        folder = self.root / "outputs"
        try:
            folder.mkdir(exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError:
            return Path.cwd() / "outputs"
        return folder

    def read_parameters(self, notebook: str, names: Mapping[str, Any]) -> LoadedConfig:
        """Validates the parameters cell (`names` is the notebook's globals()) and shows the result.

        Every plain value among the globals is a parameter; a name that starts with "_" is yours.
        Raises as `load_config` does, and RuntimeError if the parameters ask for an accelerator that
        this session does not have.
        """
        values = {
            name: value
            for name, value in names.items()
            if not name.startswith("_") and name not in IPYTHON_NAMES
            if isinstance(value, PARAMETER_TYPES)
        }
        loaded = load_config(notebook, values, root=self.root)
        rows = [
            {
                "parameter": field.name,
                "value": getattr(loaded.config, field.name),
                "from": loaded.origins[field.name],
            }
            for field in fields(loaded.config)
        ]
        show_table(rows, caption=f"{notebook}, run {loaded.config.run}")
        self.require_accelerator(loaded)
        return loaded

    def require_accelerator(self, loaded: LoadedConfig) -> None:
        """Raises RuntimeError if the parameters ask for an accelerator that is not here."""
        if isinstance(loaded.config, TrainConfig):
            _refuse(accelerator_refusal(loaded.config.accelerator, self.facts))

    def training_config(self, name: str) -> TrainConfig:
        """The parameter file that `name` ("<notebook>/<run>") stands for.

        Raises ValueError if it is no such name or not a training run's.
        """
        notebook, slash, run = name.partition("/")
        if not slash or not notebook.startswith("train"):
            raise ValueError(f"train: {name!r} must be '<notebook>/<run>', as 'train_hybrid/seed1'")
        config = load_config(notebook, {"run": run}, root=self.root).config
        assert isinstance(config, TrainConfig)
        return config

    def start_run(self, loaded: LoadedConfig) -> RunFolder:
        """Opens outputs/<notebook>-<run>/, drops a stale result and writes manifest.json.

        Raises RuntimeError if jax did not start on the accelerator that the parameters ask for, or
        loaded another libtpu than its own.
        """
        run = RunFolder.open(
            self.outputs / loaded.run_id,
            notebook=loaded.notebook,
            parameters={f.name: getattr(loaded.config, f.name) for f in fields(loaded.config)},
            origins=loaded.origins,
            root=self.root,
        )
        with run.recording():
            devices = run.record_devices()
            if isinstance(loaded.config, TrainConfig):
                _refuse(backend_refusal(loaded.config.accelerator, devices["backend"]))
            if devices["backend"] == "tpu":
                require_loaded_libtpu()
        return run


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(reason)


def offer_zip(run: RunFolder) -> Path:
    """Zips the run's evidence beside its folder and shows a link to the file."""
    archive = zip_run(run.path)
    show_link(archive, f"Download the evidence: {archive.name}")
    return archive
