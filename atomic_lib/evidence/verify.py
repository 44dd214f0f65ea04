# SPDX-License-Identifier: Apache-2.0
"""Checks a run folder with nothing but this file and Python 3.8 or newer.

    python verify.py [RUN ...]      without RUN: the folder that this file lies in

A copy of this file travels in every run folder. It proves integrity: that the files are the ones
that the run sealed, and that the record is consistent in itself. It cannot prove on which machine
the numbers were made. The order of trust is SUCCESS.json (which carries its own digest and the
sha256 of every other file), then SHA256SUMS (which must follow from it), then the content of each
file: JSON fields, the chain of metric rows, token counts, bits per byte, clocks, notebook cells.
One file by design, however long: alone in an empty folder it must still work.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import sys
from pathlib import Path

SUCCESS, FAILED, SUMS = "SUCCESS.json", "FAILED.json", "SHA256SUMS"
METRICS, NOTEBOOK, REPORT = "metrics.jsonl", "notebook.ipynb", "report.html"
CHECKPOINTS = "checkpoints"
# Live state and a viewer's droppings: never evidence, so neither hashed nor refused.
IGNORED_FILES = {SUMS, "heartbeat.json", ".lock"}
WATCH = "watch"  # curves and traces for whoever watches: views of metrics.jsonl
IGNORED_FOLDERS = {CHECKPOINTS, WATCH, ".ipynb_checkpoints"}
WRITTEN_BY_RUNNER = {NOTEBOOK, REPORT}  # outside the seal until the runner closes the run
CHAIN_START = "0" * 64
ESTIMATED_BYTES_PER_TOKEN = 4.2  # the divisor of every published bpb_est
# The writer computes in float64 or float32; float32 keeps 6 to 7 decimal digits.
ARITHMETIC_TOLERANCE = 1e-6
SUM_TOLERANCE = 1e-5  # between two float32 sums of the same numbers in different orders
STOP_REASONS = ("completed", "time", "max_steps", "max_tokens", "data_end")

# "name:type" or "name?:type" (may be absent); types are those of TYPES, joined by "|".
SCHEMAS = {
    "manifest.json": "schema:text run_id:text notebook:text started_at:time parameters:object "
    "origins:object seeds:object budget_seconds:number|null git:object source:object python:text "
    "platform:object packages:object environment:object devices:object|null inputs:list",
    "runtime-preflight.json": "checks:list",
    "provenance.json": "",
    "training_args.json": "",
    "config.json": "",
    "export.json": "schema:text source:object tensors:list files:object",
    "evaluation.json": "schema:text source:text models:list",
    "comparison.json": "",
    "replay.json": "source:text metrics_sha256:sha256 first_step:count|null last_step:count|null "
    "rows:count bit_exact:flag differences:count",
    SUCCESS: "schema:text run_id:text notebook:text started_at:time finished_at:time "
    "elapsed_s:number stop_reason:text final_step:count|null final_tokens:count|null "
    "results:object checkpoint:object|null metrics:object|null earlier_files:list sealed:flag "
    "files:object digest:sha256",
    FAILED: "schema:text run_id:text failed_at:time reason:text traceback:list recorded_by:text",
}
PART_SCHEMAS = {  # of the object that a field holds, or of each object in its list
    ("manifest.json", "inputs"): "path:text bytes:count method:text digest:sha256",
    ("runtime-preflight.json", "checks"): "check:text ok:flag",
    ("export.json", "tensors"): "name:text shape:list dtype:text sha256:sha256",
    ("evaluation.json", "models"): "run_id:text step:count ce:number|null bpb_est:number|null "
    "target_tokens:count",
    (SUCCESS, "checkpoint"): "path:text commit_sha256:sha256",
    (SUCCESS, "metrics"): "rows:count last_row_sha256:sha256",
}
ROWS = {  # of metrics.jsonl by kind; every row also has row:count and previous:sha256
    "header": "schema:text run_id:text tokens_per_step:count",
    "train": "step:count tokens:count loss:number|null lr:number grad_norm:number|null "
    "finite:flag skipped?:flag|count clipped?:flag clip_rate?:number|null erase_low?:number|null "
    "erase_high?:number|null write_low?:number|null write_high?:number|null "
    "decay_min?:number|null elapsed_s:number elapsed_fraction?:number|null "
    "tok_per_s?:number|null step_ms?:number|null mfu?:number|null hbm?:number|null",
    "eval": "step:count tokens:count ce:number|null bpb_est:number|null bpb_exact?:number|null "
    "bytes?:count|null exact_nats?:number|null target_tokens:count batches:count elapsed_s:number",
    "event": "event:text step?:count elapsed_s?:number",
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
# Type in a schema -> the Python types that it allows, and a test of the value or None.
TYPES: dict[str, tuple] = {
    "text": ((str,), bool),
    "count": ((int,), lambda value: value >= 0),
    "number": ((int, float), None),
    "flag": ((bool,), None),
    "object": ((dict,), None),
    "list": ((list,), None),
    "time": ((str,), _TIME.match),
    "sha256": ((str,), _SHA256.match),
    "null": ((type(None),), None),
}


def sha256_bytes(data: bytes) -> str:
    """Lower-case hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: os.PathLike[str] | str) -> str:
    """Lower-case hexadecimal sha256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def strict_json(data: bytes) -> object:
    """Parses UTF-8 JSON. Raises ValueError for anything else, also for NaN and Infinity."""
    return _DECODER.decode(data.decode("utf-8"))


def json_text(value: object) -> str:
    """The one spelling in which evidence objects are written."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def success_digest(success: dict) -> str:
    """Digest of a SUCCESS record: sha256 of the record as it is written, less "digest"."""
    rest = {key: value for key, value in success.items() if key != "digest"}
    return sha256_bytes(json_text(rest).encode("utf-8"))


def sums_text(files: dict, success_sha256: str) -> str:
    """SHA256SUMS as `sha256sum -c` reads it: every file of the seal and SUCCESS.json, by name."""
    lines = {**files, SUCCESS: success_sha256}
    return "".join(f"{lines[name]}  {name}\n" for name in sorted(lines))


def evidence_files(folder: Path) -> list[str]:
    """Names, relative with "/" and sorted, of every file that belongs to the evidence."""
    names = []
    for parent, folders, files in os.walk(str(folder)):
        relative = Path(parent).relative_to(folder)
        if relative == Path("."):
            folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
            files = [name for name in files if name not in IGNORED_FILES]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [(relative / name).as_posix() for name in files + links]
    return sorted(names)


def verify(path: os.PathLike[str] | str) -> list[str]:
    """Returns what is wrong with a run folder, most telling first; an empty list means verified.

    Each entry reads "file: what" or "file:line: what". Checkpoints are checked where present.
    """
    folder = Path(path)
    if not folder.is_dir():
        return [f"{folder}: no such run folder"]
    problems = _check_end(folder)
    if not (folder / SUCCESS).is_file():
        return problems
    success, found = _load_success(folder)
    problems += found
    problems += _check_hashes(folder, success)
    changed = {problem.split(":")[0] for problem in problems}
    manifest: object = None
    for name in evidence_files(folder):
        if name.endswith(".json") and name != SUCCESS and not (folder / name).is_symlink():
            value, found = _check_json(folder, name)
            problems += found
            manifest = value if name == "manifest.json" else manifest
    if success and isinstance(manifest, dict):
        problems += _check_manifest(manifest, success)
    if (folder / METRICS).is_file():
        problems += check_metrics((folder / METRICS).read_bytes(), success)
    if success.get("sealed") and NOTEBOOK not in changed:
        problems += _check_notebook(folder, success)
    problems += _check_checkpoint(folder, success)
    return list(dict.fromkeys(problems))


def _check_end(folder: Path) -> list[str]:
    problems = []
    if (folder / FAILED).exists():
        record, found = _check_json(folder, FAILED)
        reason = record["reason"] if isinstance(record, dict) and not found else "(unreadable)"
        problems.append(f"{FAILED}: the run failed: {reason}")
    if not (folder / SUCCESS).is_file():
        problems.append(f"{SUCCESS}: missing: the run did not finish")
    return problems


def _load_success(folder: Path) -> tuple[dict, list[str]]:
    """The SUCCESS record, or {} with what is wrong with it."""
    success, problems = _check_json(folder, SUCCESS)
    if problems or not isinstance(success, dict):
        return {}, problems
    text = (folder / SUCCESS).read_bytes().decode("utf-8")
    if text != json_text(success):
        line = _first_difference(text, json_text(success))
        problems.append(f"{SUCCESS}:{line}: not as it was written")
    elif success["digest"] != success_digest(success):
        problems.append(f"{SUCCESS}: changed: its digest does not match its content")
    elif success["stop_reason"] not in STOP_REASONS:
        problems.append(f"{SUCCESS}: stop_reason must be one of {', '.join(STOP_REASONS)}")
    return ({} if problems else success), problems


def _first_difference(text: str, expected: str) -> int:
    """Line number of the first line that differs."""
    lines, wanted = text.split("\n"), expected.split("\n")
    pairs = enumerate(zip(lines, wanted), 1)  # noqa: B905 - strict= needs Python 3.10
    return next((n for n, (a, b) in pairs if a != b), min(len(lines), len(wanted)))


def _check_hashes(folder: Path, success: dict) -> list[str]:
    problems = []
    found = (folder / SUMS).is_file()
    sums = (folder / SUMS).read_bytes().decode("utf-8", "replace") if found else ""
    if not found:
        problems.append(f"{SUMS}: missing")
    if success:
        files, listing = success["files"], SUCCESS
        expected = sums_text(files, sha256_file(folder / SUCCESS))
        if found and sums != expected:
            line = _first_difference(sums, expected)
            problems.append(f"{SUMS}:{line}: not what {SUCCESS} says")
    else:  # SUCCESS.json is damaged: the list beside it still tells what else is
        files, listing = {line[66:]: line[:64] for line in sums.splitlines()}, SUMS
    present = set(evidence_files(folder)) - {SUCCESS, FAILED}
    for name in sorted(present | set(files) - {SUCCESS} | {"manifest.json", "verify.py"}):
        if name not in present:
            problems.append(f"{name}: missing")
        elif (folder / name).is_symlink():
            problems.append(f"{name}: a link, not a file")
        elif name not in files:
            if success.get("sealed", True) or name not in WRITTEN_BY_RUNNER:
                problems.append(f"{name}: not listed in {listing}")
        elif sha256_file(folder / name) != files[name]:
            problems.append(f"{name}: changed: its sha256 is not the one in {listing}")
    return problems


def _check_json(folder: Path, name: str) -> tuple[object, list[str]]:
    try:
        value = strict_json((folder / name).read_bytes())
    except json.JSONDecodeError as error:
        return None, [f"{name}:{error.lineno}: not JSON: {error.msg}"]
    except ValueError as error:
        return None, [f"{name}: not JSON: {error}"]
    kind = name.split("/")[-1]  # exports carry files of the run that they were made from
    if kind not in SCHEMAS:
        return value, []
    if not isinstance(value, dict):
        return None, [f"{name}: must hold an object"]
    problems = [f"{name}: {fault}" for fault in _faults(value, SCHEMAS[kind])]
    for (owner, field), schema in PART_SCHEMAS.items():
        part = value.get(field)
        if owner != kind or part is None:
            continue
        for index, item in enumerate(part if isinstance(part, list) else [part], 1):
            faults = _faults(item, schema)
            if field == "models" and not faults and item["ce"] is not None:
                faults = _bits_per_byte_faults(item)
            problems += [f"{name}: {field} {index}: {fault}" for fault in faults]
    return value, problems


@functools.lru_cache(maxsize=None)  # noqa: UP033 - cache needs Python 3.9
def _fields(schema: str) -> list[tuple[str, bool, str, dict]]:
    """Name, whether it may be absent, its types in words, and the test of each Python type."""
    fields = []
    for name, kinds in (field.split(":") for field in schema.split()):
        tests = {one: TYPES[kind][1] for kind in kinds.split("|") for one in TYPES[kind][0]}
        fields.append((name.rstrip("?"), name.endswith("?"), kinds.replace("|", " or "), tests))
    return fields


def _faults(value: object, schema: str) -> list[str]:
    if not isinstance(value, dict):
        return ["must be an object"]
    faults = []
    for name, optional, kinds, tests in _fields(schema):
        if name not in value:
            if not optional:
                faults.append(f"field {name!r} is missing")
            continue
        field = value[name]
        kind = type(field)
        if kind not in tests or (tests[kind] and not tests[kind](field)):
            faults.append(f"field {name!r} must be {kinds}, not {field!r}")
    return faults


def _check_manifest(manifest: dict, success: dict) -> list[str]:
    problems = []
    for field in ("run_id", "notebook", "started_at"):
        if manifest.get(field) != success[field]:
            problems.append(f"manifest.json: {field} is not the {success[field]!r} of {SUCCESS}")
    parameters, origins = manifest.get("parameters"), manifest.get("origins")
    if isinstance(parameters, dict) and isinstance(origins, dict):
        missing = sorted(set(parameters) - set(origins))
        problems += [f"manifest.json: parameter {name!r} has no origin" for name in missing]
    return problems


def check_metrics(data: bytes, success: dict) -> list[str]:
    """What is wrong with the bytes of a metrics.jsonl, given the SUCCESS record (or {}).

    Each row carries its line number and the sha256 of the line before it; SUCCESS.json closes the
    chain with the number of rows and the sha256 of the last one.
    """
    lines = data.split(b"\n")
    torn = lines.pop()
    problems = [_at(len(lines) + 1, "the last line is torn")] if torn else []
    rows = []
    for number, line in enumerate(lines, 1):
        row, fault = _parse_row(line)
        rows.append(row)
        if fault:
            problems.append(_at(number, fault))
    problems += _check_chain(lines, rows, success.get("metrics") or {})
    header = rows[0] if rows and rows[0].get("kind") == "header" else {}
    if not header:
        problems.append(_at(1, "the first row must be the header"))
    elif success and header["run_id"] != success["run_id"]:
        problems.append(_at(1, f"run_id is not the {success['run_id']!r} of {SUCCESS}"))
    return problems + _check_progress(rows, header.get("tokens_per_step"), success)


def _at(line: int, fault: str) -> str:
    return f"{METRICS}:{line}: {fault}"


def _parse_row(line: bytes) -> tuple[dict, str]:
    try:
        row = strict_json(line)
    except ValueError as error:
        return {}, f"not JSON: {error}"
    if not isinstance(row, dict) or row.get("kind") not in ROWS:
        return {}, f"kind must be one of {', '.join(ROWS)}"
    faults = _faults(row, ROWS[row["kind"]]) + _faults(row, "row:count previous:sha256")
    return ({}, faults[0]) if faults else (row, "")


def _check_chain(lines: list[bytes], rows: list[dict], end: dict) -> list[str]:
    problems: list[str] = []
    hashes = [CHAIN_START] + [sha256_bytes(line) for line in lines]
    broken = []
    for number, row in enumerate(rows, 1):
        if row and row["previous"] != hashes[number - 1]:
            broken.append(number)
        if row and row["row"] != number and not problems:
            problems.append(_at(number, f"holds row {row['row']}: lines were removed or added"))
    if end and end["last_row_sha256"] != hashes[-1]:
        broken.append(len(lines) + 1)
    if end and end["rows"] != len(lines):
        problems.append(_at(len(lines), f"the last line, but {SUCCESS} counts {end['rows']}"))
    for number in broken:  # a changed link breaks two joints, changed content only the next one
        if number - 1 not in broken:
            line = number if number + 1 in broken or number == 1 else number - 1
            problems.append(_at(line, "changed, or lines after it removed: the chain breaks here"))
    return problems


def _check_progress(rows: list[dict], tokens_per_step: object, success: dict) -> list[str]:
    """Tokens, bits per byte, and clocks that never run back except at a resume."""
    problems = []
    steps = {"train": -1, "eval": -1}
    elapsed, last = 0.0, None
    for number, row in enumerate(rows, 1):
        kind = row.get("kind")
        if kind == "event" and row["event"] == "resume":
            at = row.get("step", 0)
            steps = {"train": at, "eval": min(at, steps["eval"])}
            elapsed = row.get("elapsed_s", 0.0)
        if kind not in steps:
            continue
        step, least = row["step"], steps[kind] + (kind == "train")
        if tokens_per_step is not None and row["tokens"] != step * tokens_per_step:
            problems.append(_at(number, f"tokens is not step {step} x {tokens_per_step}"))
        if step < least:
            problems.append(_at(number, f"step {step} comes after {steps[kind]} without a resume"))
        if row["elapsed_s"] < elapsed:
            problems.append(_at(number, f"elapsed_s runs back from {elapsed}"))
        steps[kind], elapsed = step, row["elapsed_s"]
        if kind == "train":
            last = (step, row["tokens"])
            if row["loss"] is None and row["finite"]:
                problems.append(_at(number, "loss is null although finite is true"))
        elif row["ce"] is not None:
            problems += [_at(number, fault) for fault in _bits_per_byte_faults(row)]
    if success and last and last != (success["final_step"], success["final_tokens"]):
        problems.append(f"{SUCCESS}: final_step and final_tokens are not {METRICS}'s {last}")
    return problems


def _bits_per_byte_faults(row: dict) -> list[str]:
    """bpb_est = ce / ln 2 / 4.2; bpb_exact = exact_nats / ln 2 / bytes, summed over the targets
    that have bytes. Without exact_nats only its upper bound, ce * target_tokens, is checked."""
    bits, exact = row["ce"] / math.log(2), row.get("bpb_exact")
    faults = []
    if not _close(row["bpb_est"], bits / ESTIMATED_BYTES_PER_TOKEN):
        faults.append(f"bpb_est is not ce / ln 2 / 4.2 = {bits / ESTIMATED_BYTES_PER_TOKEN}")
    if exact is None:
        return faults
    if not row.get("bytes"):
        return [*faults, "bpb_exact without a count of bytes"]
    nats = row.get("exact_nats")
    if nats is not None and not _close(exact, nats / math.log(2) / row["bytes"]):
        faults.append("bpb_exact is not exact_nats / ln 2 / bytes")
    if exact > bits * row["target_tokens"] / row["bytes"] * (1 + SUM_TOLERANCE):
        faults.append("bpb_exact is above ce * target_tokens / ln 2 / bytes")
    return faults


def _close(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=ARITHMETIC_TOLERANCE)


def _check_notebook(folder: Path, success: dict) -> list[str]:
    """Every code cell of the sealed notebook ran, in order and without error, in this run."""
    if not (folder / NOTEBOOK).is_file():
        return [f"{NOTEBOOK}: missing from a sealed run"]
    try:
        notebook = json.loads((folder / NOTEBOOK).read_bytes().decode("utf-8"))
    except ValueError as error:
        return [f"{NOTEBOOK}: not JSON: {error}"]
    problems = []
    count = 0
    for index, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        ran = cell["execution_count"] or 0
        if ran <= count:
            problems.append(f"{NOTEBOOK}: cell {index} did not run, or not in order")
        count = max(ran, count)
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            problems.append(f"{NOTEBOOK}: cell {index} ended in an error")
    times = notebook["metadata"].get("papermill", {})
    first, last = times.get("start_time") or "", times.get("end_time") or "9"
    started, finished = success["started_at"], success["finished_at"]
    if first[:19] > started[:19] or last[:19] < finished[:19]:
        problems.append(f"{NOTEBOOK}: executed from {first} to {last}, not in this run")
    return problems


def _check_checkpoint(folder: Path, success: dict) -> list[str]:
    """The last checkpoint's commit file and the files it lists, where checkpoints are present."""
    last = success.get("checkpoint")
    if not last or not (folder / CHECKPOINTS).is_dir():
        return []
    wanted = {f"{last['path']}/commit.json": last["commit_sha256"]}
    commit = folder / last["path"] / "commit.json"
    if commit.is_file() and sha256_file(commit) == last["commit_sha256"]:
        for name, entry in json.loads(commit.read_bytes().decode("utf-8"))["files"].items():
            wanted[f"{last['path']}/{name}"] = entry["sha256"] if isinstance(entry, dict) else entry
    problems = []
    for name, digest in wanted.items():
        if not (folder / name).is_file():
            problems.append(f"{name}: missing")
        elif sha256_file(folder / name) != digest:
            problems.append(f"{name}: changed: its sha256 is not the one recorded")
    return problems


def main(arguments: list[str]) -> int:
    """Prints one line a run, and its problems. Returns 0 only if every run is verified."""
    refused = 0
    for folder in arguments or [os.path.dirname(os.path.abspath(__file__))]:
        problems = verify(folder)
        refused += bool(problems)
        print(f"{'REFUSED ' if problems else 'VERIFIED'}  {folder}")
        for problem in problems[:20]:
            print(f"  {problem}")
        if len(problems) > 20:
            print(f"  and {len(problems) - 20} more")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
