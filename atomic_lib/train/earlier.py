# SPDX-License-Identifier: Apache-2.0
"""What earlier sessions left behind: where their folders are, and their record."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from atomic_lib.data.corpus import KAGGLE_INPUTS
from atomic_lib.evidence import RunFolder, read_rows
from atomic_lib.evidence.verify import CHECKPOINTS, METRICS
from atomic_lib.train.checkpoint import Checkpoint

# Where a mount holds a run folder: an output that was kept whole, and one that was kept alone.
IN_A_PLACE = ("{run}", "outputs/{run}")
# Depths at which Kaggle mounts an attached output: <slug>, <kind>/<owner>/<slug>.
MOUNTS = ("*", "*/*/*")


def locate(run: RunFolder, parameter: str, name: str) -> Path:
    """The path that `name` means: below the repository, beside the run folder, or from here.

    Raises FileNotFoundError naming the parameter and the places.
    """
    places = [base / Path(name).expanduser() for base in (run.root, run.path.parent, Path.cwd())]
    for place in places:
        if place.exists():
            return place
    looked = ", ".join(dict.fromkeys(str(place) for place in places))
    raise FileNotFoundError(f"{parameter}: {name!r} does not exist; looked at {looked}")


def attached_checkpoints(
    run: RunFolder, resume_from: Sequence[str], *, mounts: Sequence[Path] = KAGGLE_INPUTS
) -> list[Path]:
    """The checkpoint folders of this run outside it: in `resume_from`, and attached in `mounts`.

    A place of `resume_from` is a run folder, or a folder that holds one of this run's name. Raises
    FileNotFoundError for a place that has none.
    """
    found = []
    for name in resume_from:
        place = locate(run, "resume_from", name)
        inside = [place, *(place / form.format(run=run.run_id) for form in IN_A_PLACE)]
        folders = [folder / CHECKPOINTS for folder in inside if (folder / CHECKPOINTS).is_dir()]
        if not folders:
            raise FileNotFoundError(
                f"resume_from: {place} holds no {CHECKPOINTS}/ and no {run.run_id}/{CHECKPOINTS}/"
            )
        found += folders
    for inputs in mounts:
        for mount in MOUNTS:
            for form in IN_A_PLACE:
                found += inputs.glob(f"{mount}/{form.format(run=run.run_id)}/{CHECKPOINTS}")
    return list(dict.fromkeys(found))


def import_history(run: RunFolder, checkpoint: Checkpoint) -> None:
    """Copies the metrics of the session that wrote `checkpoint`, if this run has none and it is
    the same run, so that its record is whole."""
    theirs = checkpoint.path.parent.parent / METRICS
    ours = run.path / METRICS
    if ours.exists() or not theirs.is_file():
        return
    header = next(iter(read_rows(theirs)), {})
    if header.get("run_id") == run.run_id:
        shutil.copyfile(theirs, ours)
