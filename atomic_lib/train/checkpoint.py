# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or do not count.

    checkpoints/step_00000060/
        state/         Orbax, written synchronously: nothing trains while it is being written
        commit.json    step, position, configuration, sha256 of every file of state/

Both are made in checkpoints/partial/, commit.json last; then the folder gets its name.

Reading takes the newest checkpoint whose files have the hashes that its commit states, and falls
back to the one before. Names of the state's arrays do not depend on the number of devices.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from atomic_lib.evidence.files import plain, sync_folder, write_json
from atomic_lib.evidence.verify import sha256_bytes, sha256_file
from atomic_lib.hosts.processes import is_first, together

COMMIT = "commit.json"
STATE = "state"
COMMIT_SCHEMA = "atomic-checkpoint/1"
STEP_PREFIX = "step_"
PARTIAL = "partial"
# Orbax writes metadata beside the arrays, and the commit follows: 16 MB is ample for both.
SPARE_BYTES = 16 << 20


class ConfigMismatchError(ValueError):
    """A checkpoint belongs to another configuration than the run that found it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint; `facts` is the content of its commit.json."""

    path: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """Training steps that were finished when it was written."""
        return self.facts["step"]

    def problem(self) -> str | None:
        """What is wrong with its files, or None: every file is there and has its hash."""
        for name, wanted in self.facts["files"].items():
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != wanted["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {wanted['bytes']}"
            if sha256_file(file) != wanted["sha256"]:
                return f"{name} does not have its sha256"
        return None

    def restore(self, like: Any) -> Any:
        """Reads the state into the structure, dtypes and shardings of the abstract pytree `like`.

        Leaves are jax.ShapeDtypeStruct with a sharding. Raises ValueError if a shape differs.
        """
        arguments = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
        )
        restored = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
            self.path / STATE, args=arguments
        )
        for found, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                raise ValueError(
                    f"checkpoint {self.path} holds {found.dtype} {found.shape} where the model has "
                    f"{wanted.dtype} {wanted.shape}; it belongs to another model"
                )
        return restored


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of a configuration as JSON with sorted names."""
    return sha256_bytes(json.dumps(plain(config), sort_keys=True).encode())


def config_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Lines "name: theirs -> ours" for every value that differs; nested names joined by dots."""
    lines: list[str] = []
    for name in sorted({*theirs, *ours}):
        old, new = theirs.get(name), ours.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += [f"{name}.{line}" for line in config_differences(old, new)]
        elif old != new:
            lines.append(f"{name}: {old!r} -> {new!r}")
    return lines


@dataclass(kw_only=True)
class CheckpointStore:
    """The checkpoints of one run: `folder` is written, `others` are only read.

    `config` is what a checkpoint must agree with (see `resume.resume_config`); `keep` how many
    stay. `rejected` holds "path: problem" for every checkpoint that reading has passed over.
    """

    folder: Path
    config: dict[str, Any]
    keep: int = 2
    others: Sequence[Path] = ()
    rejected: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self):
        self.config = plain(self.config)  # as it will come back from commit.json

    def drop_partial(self) -> None:
        """Removes what a killed session left half written; it may be gigabytes."""
        shutil.rmtree(self.folder / PARTIAL, ignore_errors=True)

    def newest_valid(self, *, others_before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint of any folder whose hashes are right, or None.

        Those of `others` count only below step `others_before`, if that is given.

        Raises ConfigMismatchError if that one was written under another configuration, with the
        values that differ.
        """
        found = list(self._committed(self.folder))
        for folder in self.others:
            limit = float("inf") if others_before is None else others_before
            found += [c for c in self._committed(folder) if c.step < limit]
        for checkpoint in sorted(found, key=lambda c: c.step, reverse=True):
            problem = checkpoint.problem()
            if problem is None:
                self._require_same_config(checkpoint)
                return checkpoint
            self.rejected[checkpoint.path] = problem
        return None

    def save(self, state: Any, *, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Writes and commits one checkpoint, then drops the oldest beyond `keep`.

        `state` is a pytree of arrays; `facts` (JSON) is stored beside it. Every process of a run
        calls this and writes its part, the first one commits. Raises OSError, in all of them, if
        the disk has no room or fails; earlier checkpoints are untouched then, and no part is left.
        """
        path = self.folder / f"{STEP_PREFIX}{step:08d}"
        partial = self.folder / PARTIAL
        what = f"save step {step}"
        together(lambda: self._begin(state), what, first_only=True)
        commit = {
            "schema": COMMIT_SCHEMA,
            "step": step,
            **facts,
            "config_sha256": config_hash(self.config),
            "config": self.config,
        }
        try:
            together(lambda: self._write_state(partial / STATE, state), what)
            together(lambda: self._commit(path, commit), what, first_only=True)
        except BaseException:
            if is_first():
                self.drop_partial()
            raise
        self.rejected.pop(path, None)
        return Checkpoint(path=path, facts=json.loads((path / COMMIT).read_text(encoding="utf-8")))

    def _begin(self, state: Any) -> None:
        """Makes an empty partial folder, if there is room for `state`."""
        self.drop_partial()
        self._require_space(state)
        (self.folder / PARTIAL).mkdir()

    def _commit(self, path: Path, commit: dict[str, Any]) -> None:
        """Writes the commit of what is partial, gives it its name, and drops what is too old."""
        partial = self.folder / PARTIAL
        write_json(partial / COMMIT, {**commit, "files": _file_facts(partial)})
        if path.exists():  # reading has rejected it
            shutil.rmtree(path)
        partial.rename(path)
        sync_folder(self.folder)
        self.rejected.pop(path, None)
        self._prune()

    def _write_state(self, path: Path, state: Any) -> None:
        try:
            # Float32 values compress by 8 %, for five times the processor time of the rest.
            handler = ocp.PyTreeCheckpointHandler(use_compression=False)
            ocp.Checkpointer(handler).save(path, args=ocp.args.PyTreeSave(state))
        except ValueError as error:
            # TensorStore reports what the system refused as a ValueError that ends in its number.
            code = re.search(r"\[os_error_code='(\d+)'\]", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error

    def _require_space(self, state: Any) -> None:
        needed = state_bytes(state) + SPARE_BYTES
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                f"checkpoint needs {needed / 1e9:.2f} GB in {self.folder}, and {free / 1e9:.2f} GB "
                "are free; delete something, or set keep_checkpoints lower"
            )

    def _require_same_config(self, checkpoint: Checkpoint) -> None:
        theirs = checkpoint.facts["config"]
        if config_hash(theirs) == config_hash(self.config):
            return
        differences = "\n  ".join(config_differences(theirs, self.config))
        raise ConfigMismatchError(
            f"checkpoint {checkpoint.path} has another configuration:\n  {differences}\n"
            "Restore those values, give this run another name, or move the checkpoint away."
        )

    def _committed(self, folder: Path) -> Iterator[Checkpoint]:
        for path in sorted(Path(folder).glob(f"{STEP_PREFIX}*")):
            try:
                facts = json.loads((path / COMMIT).read_text(encoding="utf-8"))
                valid = isinstance(facts["step"], int) and isinstance(facts["files"], dict)
            except FileNotFoundError:
                self.rejected[path] = "it was never committed"
                continue
            except (ValueError, KeyError, TypeError):
                valid = False
            if valid:
                yield Checkpoint(path=path, facts=facts)
            else:
                self.rejected[path] = f"{COMMIT} cannot be read"

    def _prune(self) -> None:
        good = []
        for path in sorted(self.folder.glob(f"{STEP_PREFIX}*")):
            if (path / COMMIT).is_file() and path not in self.rejected:
                good.append(path)
            else:
                shutil.rmtree(path)
        for path in good[: -self.keep]:
            # A process that is killed in here leaves no half of a checkpoint under a whole one's
            # name: the next `save` clears what is partial.
            path.rename(self.folder / PARTIAL)
            shutil.rmtree(self.folder / PARTIAL)


def state_bytes(state: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _file_facts(path: Path) -> dict[str, dict[str, Any]]:
    return {
        file.relative_to(path).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": sha256_file(file),
        }
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
