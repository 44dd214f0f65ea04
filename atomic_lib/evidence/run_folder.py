# SPDX-License-Identifier: Apache-2.0
"""One run's folder: opened at the start, filled by the notebook, closed by `succeed` or `fail`."""

import contextlib
import io
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atomic_lib.evidence.files import atomic_write, plain, write_json
from atomic_lib.evidence.lock import lock_folder, unlock_folder
from atomic_lib.evidence.manifest import build_manifest, device_facts, input_record, utc_now
from atomic_lib.evidence.metrics_log import MetricsLog
from atomic_lib.evidence.seal import drop_success, write_failure, write_success
from atomic_lib.evidence.verify import (
    CHECKPOINTS,
    FAILED,
    METRICS,
    NOTEBOOK,
    REPORT,
    evidence_files,
)

HEARTBEAT = "heartbeat.json"
HEARTBEAT_SECONDS = 1.0
FIGURE_DPI = 120


class RunFolder:
    """outputs/<run_id>/ and its evidence. Make one with `RunFolder.open`.

    `path` is the folder, `metrics` its log, `checkpoints` where its checkpoints go (a process of a
    larger run sets it to the run's), `parameters` what the run was given. Whatever lies in
    the folder when the run succeeds becomes evidence, except checkpoints/.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], root: Path):
        self.path = path
        self.metrics = MetricsLog(path / METRICS)
        self.checkpoints = path / CHECKPOINTS
        self._manifest = manifest
        self._root = root
        self._opened_at = time.monotonic()
        self._files_at_open = _file_states(path)
        self._closed = False
        self._heartbeat: tuple[float, str] = (float("-inf"), "")

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        notebook: str,
        parameters: Mapping[str, Any],
        origins: Mapping[str, str],
        root: Path,
    ) -> "RunFolder":
        """Opens a run folder, new or left by an earlier session; its name is the run's id.

        An earlier result (SUCCESS.json, FAILED.json, SHA256SUMS, report.html) is removed first;
        metrics.jsonl, checkpoints/ and all other files stay. Then manifest.json is written.
        `parameters` and `origins` have the same names; `root` is the repository. Raises
        RuntimeError if another process has the folder open.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        lock_folder(path)
        clear_result(path)
        started_at = utc_now()
        manifest = build_manifest(
            run_id=path.name,
            notebook=notebook,
            parameters=plain(parameters),
            origins=origins,
            root=Path(root),
            started_at=started_at,
        )
        run = cls(path, manifest, Path(root))
        shutil.copyfile(Path(__file__).with_name("verify.py"), path / "verify.py")
        run._write_manifest()
        run.progress("started", 0, 0, notebook)
        return run

    @property
    def run_id(self) -> str:
        """Name of the folder: <notebook>-<run>."""
        return self.path.name

    @property
    def root(self) -> Path:
        """The repository that the run was made from."""
        return self._root

    @property
    def parameters(self) -> dict[str, Any]:
        """The resolved parameters, as manifest.json has them."""
        return dict(self._manifest["parameters"])

    def record_devices(self) -> dict[str, Any]:
        """Adds jax's versions and devices to manifest.json, and returns them (`device_facts`).

        Imports jax and starts its backend.
        """
        facts = self._manifest["devices"] = device_facts()
        self._write_manifest()
        return facts

    def record_inputs(self, *paths: Path) -> None:
        """Adds input files to manifest.json with size and digest (sampled from 2 GiB on)."""
        records = {entry["path"]: entry for entry in self._manifest["inputs"]}
        for path in paths:
            entry = input_record(path, self._root)
            records[entry["path"]] = entry
        self._manifest["inputs"] = list(records.values())
        self._write_manifest()

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Writes one evidence file (`name` relative to the folder), atomically; see `plain`."""
        target = self._target(name)
        write_json(target, value)
        return target

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads one evidence file (`name` relative to the folder) of this run."""
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def save_figure(self, name: str, figure: Any) -> Path:
        """Writes a matplotlib figure as figures/<name>.png, the same bytes for the same figure."""
        target = self._target(f"figures/{name}.png")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=FIGURE_DPI, bbox_inches="tight",
                       metadata={"Software": None})  # fmt: skip
        atomic_write(target, buffer.getvalue())
        return target

    def progress(self, stage: str, done: float, total: float, text: str = "", **facts: Any) -> None:
        """Says where the run is, for whoever watches: heartbeat.json, at most once a second.

        `done` of `total` (0: unknown) in any unit; a new stage and the end of one always count.
        `facts` (JSON) stand beside them. A disk that refuses the file stops no run.
        """
        now = time.monotonic()
        written_at, written_stage = self._heartbeat
        ended = total > 0 and done >= total
        if stage == written_stage and not ended and now - written_at < HEARTBEAT_SECONDS:
            return
        self._heartbeat = (now, stage)
        beat = {
            "time": time.time(), "pid": os.getpid(), "stage": stage, "done": done, "total": total,
            "text": text, "elapsed_s": now - self._opened_at, **facts,
        }  # fmt: skip
        # Not evidence, so no fsync: a reader needs the whole file, not the newest one.
        temporary = self.path / f".{HEARTBEAT}.tmp"
        with contextlib.suppress(OSError):  # a full disk must not end what it only watches
            temporary.write_text(json.dumps(plain(beat)), encoding="utf-8")
            os.replace(temporary, self.path / HEARTBEAT)

    @contextlib.contextmanager
    def recording(self) -> Iterator["RunFolder"]:
        """Writes FAILED.json if the block raises (sys.exit and interrupts too), and raises on.

        A FAILED.json of an earlier attempt in this session is removed at the start.
        """
        (self.path / FAILED).unlink(missing_ok=True)
        try:
            yield self
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                self.fail(reason, traceback.format_exception(error))
            except OSError as refused:  # a full disk: the reason must still reach the reader
                error.add_note(f"{FAILED} could not be written: {refused}")
            raise

    def fail(self, reason: str, traceback_lines: list[str] | None = None) -> None:
        """Closes the run as failed: removes SUCCESS.json if there is one, writes FAILED.json."""
        write_failure(
            self.path, reason=reason, traceback_lines=traceback_lines or [], recorded_by="kernel"
        )

    def succeed(self, stop_reason: str, **results: Any) -> dict[str, Any]:
        """Closes the run: SUCCESS.json with the hash of every file, then SHA256SUMS. Returns it.

        `stop_reason` is completed, time, max_steps, max_tokens or data_end. After this nothing
        more can be written. Raises RuntimeError if a FAILED.json is there, ValueError for an
        unknown stop_reason.
        """
        self._require_open()
        self.metrics.sync()
        self.progress("finished", 1, 1, stop_reason)
        now = _file_states(self.path)
        success = write_success(
            self.path,
            manifest=self._manifest,
            stop_reason=stop_reason,
            results=plain(results),
            elapsed_seconds=time.monotonic() - self._opened_at,
            earlier_files=sorted(n for n, s in self._files_at_open.items() if now.get(n) == s),
        )
        self._closed = True
        unlock_folder(self.path)
        return success

    def _target(self, name: str) -> Path:
        self._require_open()
        target = self.path / name
        if not target.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"name: {name!r} is outside the run folder {self.path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _write_manifest(self) -> None:
        self.write_json("manifest.json", self._manifest)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"{self.run_id} has succeeded and its files are sealed; run the notebook again "
                "from its first cell to write more"
            )


def clear_result(path: Path) -> None:
    """Removes the result of an earlier session, its zip, and what a killed one left half done."""
    drop_success(path)
    for name in (FAILED, REPORT):
        (path / name).unlink(missing_ok=True)
    for name in evidence_files(path):
        file = path / name
        if file.name.startswith(".") and file.suffix == ".tmp":
            file.unlink()


def _file_states(path: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every evidence file but those that the runner writes."""
    states = {}
    for name in evidence_files(path):
        if name not in (NOTEBOOK, REPORT):
            status = (path / name).lstat()
            states[name] = (status.st_size, status.st_mtime_ns)
    return states
