# SPDX-License-Identifier: Apache-2.0
"""Protects: every notebook runs from top to bottom at smoke size and leaves evidence that verifies.

nbval executes the very cells that a person runs, in the notebook's own folder, after papermill has
put in the smoke parameters (nbval itself runs a notebook's defaults). The evidence is judged by
`verify`, which shares no code with what wrote it. The hybrid trains on eight fake devices, so that
the mesh of a v5e-8 is exercised too.
"""

import json
import subprocess
import sys
from pathlib import Path

import papermill
import pytest
import yaml

from atomic_lib.evidence import effective_rows, read_rows, verify

ROOT = Path(__file__).resolve().parents[2]
# 07_train has the cells of 02 and 03 (see test_sources); running it too would take minutes.
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0[0-6]_*.ipynb"))
CELL_SECONDS = 400
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# One sequence a device; the baseline takes as many, or the two runs could not be compared. Twice
# the smoke run's sequences need half of its steps.
TRAINING = {"batch_size": 8, "max_steps": 30}
# A run must end below this fraction of its loss before the first step.
CLEARLY_BELOW = 0.9

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_smoke_run_passes_and_verifies(notebook, repository, environment):
    """In the notebooks' order: the later ones read what the earlier ones made."""
    name = notebook.stem.split("_", 1)[1]
    prepared = repository / "notebooks" / notebook.name
    parameters = yaml.safe_load((repository / "params" / name / "smoke.yaml").read_text())
    if name.startswith("train_"):
        parameters |= TRAINING
    papermill.execute_notebook(
        notebook, prepared, parameters, prepare_only=True, progress_bar=False
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax",
         f"--nbval-cell-timeout={CELL_SECONDS}", "--nbval-kernel-name=python3", prepared.name],
        cwd=prepared.parent,
        env=environment | (EIGHT_DEVICES if name == "train_hybrid" else {}),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    folder = repository / "outputs" / f"{name}-smoke"
    assert verify(folder) == []
    if name.startswith("train_"):
        losses = [
            row["ce"]
            for row in effective_rows(read_rows(folder / "metrics.jsonl"))
            if row["kind"] == "eval"
        ]
        assert losses[-1] < CLEARLY_BELOW * losses[0]
        devices = json.loads((folder / "manifest.json").read_text())["devices"]
        assert len(devices["devices"]) == (8 if name == "train_hybrid" else 1)
