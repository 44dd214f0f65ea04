# SPDX-License-Identifier: Apache-2.0
"""Folders that `kaggle datasets create` and `kaggle kernels push` take.

    <target>/code/                  dataset-metadata.json and the code that every notebook imports
    <target>/kernels/<job>/         kernel-metadata.json and one notebook with its run set

A push sends one file, so the packages travel as an attached dataset, and a pushed notebook runs its
parameters cell as it stands, so `run` is written into it. A run that asks for an accelerator gets
the TPU v5e-8, every other one the CPU. The rules that the kaggle package checks before it uploads
(names, lengths, a title that gives the same slug) are those of the tests.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic_lib.config import PreflightConfig, RunConfig, TrainConfig, load_config
from atomic_lib.data.corpus import kaggle_dataset
from atomic_lib.run.jobs import Job, Roots, available, find_jobs

CODE_SLUG, CODE_TITLE = "atomic-gdn2-code", "Atomic GDN2 code"
CODE_SUBTITLE = "The packages and parameter files that the notebooks import"
CODE = ("atomic_lib", "kernels", "params", "requirements.txt", "pyproject.toml", "LICENSE")
TPU_SHAPE = "TpuV5E8"
# Notebooks that read no other run's folder: each is a session of its own.
INDEPENDENT = ("preflight", "kernel_audit", "train_baseline", "train_hybrid", "train")
OWNER = re.compile(r"[a-z0-9][a-z0-9-]{2,}")


@dataclass(frozen=True, kw_only=True)
class Push:
    """What was written: the dataset's folder, and one folder a notebook run."""

    code: Path
    kernels: tuple[Path, ...]

    def commands(self) -> list[str]:
        """The shell commands that upload it, in order."""
        return [
            f"kaggle datasets create -p {self.code} --dir-mode zip",
            *(f"kaggle kernels push -p {folder}" for folder in self.kernels),
        ]


def write_push(root: Path, target: Path, *, owner: str, names: Sequence[str] = ()) -> Push:
    """Writes the dataset and kernel folders for the Kaggle user `owner` below `target`.

    names: jobs as the runner takes them ("train_hybrid/seed1"); none means every run that can be a
    session of its own and ends within it. What was at `target` is replaced. Raises ValueError for
    an owner that is no Kaggle name, an unknown job, or one that reads other runs.
    """
    if not OWNER.fullmatch(owner):
        raise ValueError(
            f"owner: {owner!r} is no Kaggle user name; it has lower-case letters, digits and '-', "
            "at least three. Give the one in your profile's address."
        )
    jobs = list(_chosen(root, names))
    shutil.rmtree(target, ignore_errors=True)
    code = target / "code"
    code.mkdir(parents=True)
    for name in CODE:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, code / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copyfile(source, code / name)
    _write_json(code / "dataset-metadata.json", {
        "id": f"{owner}/{CODE_SLUG}",
        "title": CODE_TITLE,
        "subtitle": CODE_SUBTITLE,
        "licenses": [{"name": "other"}],  # Apache-2.0: LICENSE is among the files
    })  # fmt: skip
    kernels = tuple(_write_kernel(root, target / "kernels", owner, *job) for job in jobs)
    return Push(code=code, kernels=kernels)


def _chosen(root: Path, names: Sequence[str]) -> Iterator[tuple[Job, RunConfig]]:
    roots = Roots.of(root)
    for job in find_jobs(names, roots) if names else available(roots):
        config = load_config(job.notebook, {"run": job.run}, root=root).config
        if job.notebook in INDEPENDENT:
            # Without a budget the session's end would cut the run off.
            if names or not isinstance(config, TrainConfig) or config.budget_seconds is not None:
                yield job, config
        elif names:
            raise ValueError(
                f"{job.name} reads the folders of other runs, which a session of its own does not "
                f"have; run it where they are. A session can be made of {', '.join(INDEPENDENT)}."
            )


def _write_kernel(root: Path, folder: Path, owner: str, job: Job, config: RunConfig) -> Path:
    title = f"Atomic {job.notebook} {job.run}".replace("_", " ")
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower())
    training = _training_config(root, config)
    on_tpu = training is not None and training.accelerator in ("tpu", "any")
    corpus = kaggle_dataset(training.corpus) if training else None
    place = folder / f"{job.notebook}-{job.run}"
    place.mkdir(parents=True)
    notebook = json.loads(job.notebook_file.read_text(encoding="utf-8"))
    _set_run(notebook, job)
    _write_json(place / f"{slug}.ipynb", notebook)
    _write_json(place / "kernel-metadata.json", {
        "id": f"{owner}/{slug}",
        "title": title,
        "code_file": f"{slug}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": False,
        "enable_tpu": on_tpu,
        "enable_internet": True,
        **({"machine_shape": TPU_SHAPE} if on_tpu else {}),
        "dataset_sources": [f"{owner}/{CODE_SLUG}", *([corpus] if corpus else [])],
        "competition_sources": [],
        "kernel_sources": [],
        "model_sources": [],
    })  # fmt: skip
    return place


def _training_config(root: Path, config: RunConfig) -> TrainConfig | None:
    """The training run that a notebook starts or checks, or None."""
    if isinstance(config, PreflightConfig):
        notebook, _, run = config.train.partition("/")
        config = load_config(notebook, {"run": run}, root=root).config
    return config if isinstance(config, TrainConfig) else None


def _set_run(notebook: dict[str, Any], job: Job) -> None:
    """Writes the run's name into the parameters cell."""
    cells = [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    source = "".join(cells[0]["source"])
    changed, count = re.subn(r'^run: str = "[^"]*"', f'run: str = "{job.run}"', source, flags=re.M)
    if len(cells) != 1 or count != 1:
        raise ValueError(
            f"{job.notebook_file} has no parameters cell with one line 'run: str = ...'"
        )
    cells[0]["source"] = changed


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
