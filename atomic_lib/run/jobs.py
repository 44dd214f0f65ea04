# SPDX-License-Identifier: Apache-2.0
"""From the names on the command line to notebooks, parameter files and run folders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NUMBERED = "[0-9][0-9]_"  # notebooks/03_train_hybrid.ipynb


@dataclass(frozen=True, kw_only=True)
class Job:
    """One notebook with one parameter file, and where its evidence goes."""

    notebook: str  # without its number
    run: str
    notebook_file: Path
    parameter_file: Path
    folder: Path
    root: Path

    @property
    def name(self) -> str:
        """As the command line takes it: <notebook>/<run>."""
        return f"{self.notebook}/{self.run}"


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Where things lie: `root` has notebooks/, params/ and the packages; runs go to `outputs`."""

    root: Path
    outputs: Path

    @classmethod
    def of(cls, root: Path) -> "Roots":
        """The layout of the repository at `root`."""
        root = Path(root).resolve()
        return cls(root=root, outputs=root / "outputs")


def available(roots: Roots) -> list[Job]:
    """Every parameter file that has a notebook, in the notebooks' order."""
    jobs = []
    for notebook_file in sorted((roots.root / "notebooks").glob(f"{NUMBERED}*.ipynb")):
        notebook = notebook_file.stem[3:]
        for parameter_file in sorted((roots.root / "params" / notebook).glob("*.yaml")):
            run = parameter_file.stem
            jobs.append(
                Job(
                    notebook=notebook,
                    run=run,
                    notebook_file=notebook_file,
                    parameter_file=parameter_file,
                    folder=roots.outputs / f"{notebook}-{run}",
                    root=roots.root,
                )
            )
    return jobs


def find_jobs(names: Sequence[str], roots: Roots) -> list[Job]:
    """The jobs that `names` mean, in the order given.

    A name is a parameter file (params/train_hybrid/seed1.yaml, from here or from the root),
    <notebook>/<run>, or a run alone, which means that run of every notebook. Raises ValueError
    with the nearest names if there is no such file or no notebook for it.
    """
    known = available(roots)
    jobs: list[Job] = []
    for name in names:
        found = [job for job in known if _means(name, job)]
        if not found:
            raise ValueError(f"{name!r} is no parameter file with a notebook; {_hint(name, known)}")
        jobs += [job for job in found if job not in jobs]
    return jobs


def check_jobs(jobs: Sequence[Job], load: Callable[[Job], str]) -> None:
    """Validates every job's parameters before any of them starts.

    `load` validates one and returns the id of the run folder that the notebook will open. Raises
    what `load` raises, with the parameter file's name before it, and ValueError for a run id that
    is not the folder's name.
    """
    for job in jobs:
        try:
            run_id = load(job)
            if run_id != job.folder.name:
                raise ValueError(f"run id {run_id!r} must be {job.folder.name!r}, as the file says")
        except (ValueError, TypeError) as error:
            raise type(error)(f"{job.parameter_file}: {error}") from error


def load_parameters(job: Job) -> str:
    """Validates a job's parameter file as its notebook will. Returns the run id."""
    from atomic_lib.config import load_config

    return load_config(job.notebook, {"run": job.run}, root=job.root).run_id


def _means(name: str, job: Job) -> bool:
    if name in (job.name, job.run):
        return True
    candidates = (Path(name), job.root / name)
    return any(path.resolve() == job.parameter_file.resolve() for path in candidates)


def _hint(name: str, known: Sequence[Job]) -> str:
    from difflib import get_close_matches

    names = [job.name for job in known]
    wanted = name.removeprefix("params/").removesuffix(".yaml")
    near = get_close_matches(wanted, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names) or 'none'}"
