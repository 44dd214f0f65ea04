# SPDX-License-Identifier: Apache-2.0
"""The first cells of every notebook: where the repository is, its parameters, its run folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atomic_lib.config import LoadedConfig, TrainConfig, load_config
from atomic_lib.environment import prepare_environment
from atomic_lib.evidence import RunFolder, zip_run
from atomic_lib.notebook.display import show_link, show_table

# Names that IPython itself puts among a notebook's globals.
IPYTHON_NAMES = ("In", "Out")
PARAMETER_TYPES = (str, bool, int, float, list, tuple, dict, type(None))


@dataclass(frozen=True, kw_only=True)
class Session:
    """One notebook kernel: the repository's root, and when its first cell ran (monotonic s)."""

    root: Path
    started_at: float

    @classmethod
    def begin(cls, root: Path) -> "Session":
        """Prepares this process for jax and starts the budget's clock."""
        started_at = time.monotonic()
        installed = prepare_environment(root)
        if installed:
            print(f"installed {', '.join(installed)}")
        return cls(root=Path(root), started_at=started_at)

    @property
    def outputs(self) -> Path:
        """Where run folders go: the repository's outputs/, or here if that is read-only."""
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
        return loaded

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
        """Opens outputs/<notebook>-<run>/, drops a stale result and writes manifest.json."""
        run = RunFolder.open(
            self.outputs / loaded.run_id,
            notebook=loaded.notebook,
            parameters={f.name: getattr(loaded.config, f.name) for f in fields(loaded.config)},
            origins=loaded.origins,
            root=self.root,
        )
        with run.recording():
            run.record_devices()
        return run


def offer_zip(run: RunFolder) -> Path:
    """Zips the run's evidence beside its folder and shows a link to the file."""
    archive = zip_run(run.path)
    show_link(archive, f"Download the evidence: {archive.name}")
    return archive
