# SPDX-License-Identifier: Apache-2.0
"""Checks a run folder with nothing but this file and Python 3.8 or newer.

    python verify.py [RUN ...]      without RUN: the folder that this file lies in

A copy of this file travels in every run folder. It proves integrity: that the files are the ones
that the run sealed, and that the record is consistent in itself. It cannot prove on which machine
the numbers were made. The order of trust is SUCCESS.json (which carries its own digest and the
sha256 of every other file), then SHA256SUMS (which must follow from it), then the content of each
file: JSON fields, the chain of metric rows, token counts, bits per byte, clocks, notebook cells.
"""
from __future__ import annotations

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
IGNORED_FOLDERS = {CHECKPOINTS, ".ipynb_checkpoints"}
WRITTEN_BY_RUNNER = {NOTEBOOK, REPORT}  # outside the seal until the runner closes the run
CHAIN_START = "0" * 64
ESTIMATED_BYTES_PER_TOKEN = 4.2  # the divisor of every published bpb_est
# The writer computes in float64 or float32; float32 keeps 6 to 7 decimal digits.
ARITHMETIC_TOLERANCE = 1e-6
STOP_REASONS = ("completed", "time", "max_steps", "max_tokens", "data_end")

# Field -> type. "?" after the field: may be absent. "|null" in the type: may be null.
SCHEMAS = {
    "manifest.json": {
        "schema": "text", "run_id": "text", "notebook": "text", "started_at": "time",
        "parameters": "object", "origins": "object", "seeds": "object",
        "budget_seconds": "number|null", "git": "object", "source": "object", "python": "text",
        "platform": "object", "packages": "object", "environment": "object",
        "devices": "object|null", "inputs": "list",
    },
    "runtime-preflight.json": {"checks": "list"},
    "provenance.json": {},
    "training_args.json": {},
    "config.json": {},
    "export.json": {"tensors": "list"},
    SUCCESS: {
        "schema": "text", "run_id": "text", "notebook": "text", "started_at": "time",
        "finished_at": "time", "elapsed_s": "number", "stop_reason": "text",
        "final_step": "count|null", "final_tokens": "count|null", "results": "object",
        "checkpoint": "object|null", "metrics": "object|null", "earlier_files": "list",
        "sealed": "flag", "files": "object", "digest": "sha256",
    },
    FAILED: {
        "schema": "text", "run_id": "text", "failed_at": "time", "reason": "text",
        "traceback": "list", "recorded_by": "text",
    },
}
LIST_ITEMS = {  # fields of each object in a list
    ("manifest.json", "inputs"): {
        "path": "text", "bytes": "count", "method": "text", "digest": "sha256",
    },
    ("runtime-preflight.json", "checks"): {"check": "text", "ok": "flag"},
    ("export.json", "tensors"): {"name": "text", "shape": "list", "dtype": "text"},
}
ROWS = {
    "header": {"schema": "text", "run_id": "text", "tokens_per_step": "count"},
    "train": {
        "step": "count", "tokens": "count", "loss": "number|null", "lr": "number",
        "grad_norm": "number|null", "finite": "flag", "skipped?": "flag|count",
        "elapsed_s": "number", "elapsed_fraction?": "number|null", "tok_per_s?": "number|null",
        "step_ms?": "number|null", "mfu?": "number|null", "hbm?": "number|null",
    },
    "eval": {
        "step": "count", "tokens": "count", "ce": "number|null", "bpb_est": "number|null",
        "bpb_exact?": "number|null", "bytes?": "count|null", "exact_nats?": "number|null",
        "target_tokens": "count", "batches": "count", "elapsed_s": "number",
    },
    "event": {"event": "text", "step?": "count", "elapsed_s?": "number"},
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_IS_TYPE = {
    "text": lambda v: isinstance(v, str) and v != "",
    "count": lambda v: type(v) is int and v >= 0,
    "number": lambda v: type(v) in (int, float),
    "flag": lambda v: isinstance(v, bool),
    "object": lambda v: isinstance(v, dict),
    "list": lambda v: isinstance(v, list),
    "time": lambda v: isinstance(v, str) and _TIME.match(v) is not None,
    "sha256": lambda v: isinstance(v, str) and _SHA256.match(v) is not None,
    "null": lambda v: v is None,
}


def sha256_bytes(data: bytes) -> str:
    """Lower-case hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Lower-case hexadecimal sha256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def strict_json(text: str) -> object:
    """Parses JSON; raises ValueError also for NaN, Infinity and a key that comes twice."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _unique_keys(pairs: list) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError("%s is not JSON" % name)


def json_text(value: object) -> str:
    """The one spelling in which evidence objects are written."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def success_digest(success: dict) -> str:
    """Digest of a SUCCESS record: sha256 of the record as it is written, less "digest"."""
    rest = {key: value for key, value in success.items() if key != "digest"}
    return sha256_bytes(json_text(rest).encode("utf-8"))


def sums_text(files: dict, success_sha256: str) -> str:
    """SHA256SUMS as `sha256sum -c` reads it: every file of the seal and SUCCESS.json, by name."""
    lines = dict(files)
    lines[SUCCESS] = success_sha256
    return "".join("%s  %s\n" % (lines[name], name) for name in sorted(lines))


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


def verify(path: os.PathLike | str) -> list[str]:
    """Returns what is wrong with a run folder, most telling first; an empty list means verified.

    Each entry reads "file: what" or "file:line: what". Checkpoints are checked where present.
    """
    folder = Path(path)
    if not folder.is_dir():
        return ["%s: no such run folder" % folder]
    problems = _check_end(folder)
    if not (folder / SUCCESS).is_file():
        return problems
    success, found = _load_success(folder)
    problems += found
    problems += _check_hashes(folder, success, trusted=not found)
    contents = {}
    for name in evidence_files(folder):
        if name.endswith(".json") and not (folder / name).is_symlink():
            contents[name], found = _check_json(folder, name)
            problems += found
    problems += _check_manifest(contents.get("manifest.json"), success)
    if (folder / METRICS).is_file():
        problems += check_metrics((folder / METRICS).read_bytes(), success)
    if success.get("sealed") is True:
        problems += _check_notebook(folder, success, contents.get("manifest.json"))
    problems += _check_checkpoint(folder, success)
    return list(dict.fromkeys(problems))


def _check_end(folder: Path) -> list[str]:
    problems = []
    if (folder / FAILED).exists():
        try:
            reason = strict_json((folder / FAILED).read_text("utf-8"))["reason"]
        except (ValueError, KeyError, TypeError, OSError):
            reason = "(its reason cannot be read)"
        problems.append("%s: the run failed: %s" % (FAILED, reason))
    if not (folder / SUCCESS).is_file():
        problems.append("%s: missing: the run did not finish" % SUCCESS)
    return problems


def _load_success(folder: Path) -> tuple[dict, list[str]]:
    success, problems = _check_json(folder, SUCCESS)
    if problems:
        return (success if isinstance(success, dict) else {}), problems
    text = (folder / SUCCESS).read_bytes().decode("utf-8")
    if text != json_text(success):
        line = _first_difference(text, json_text(success))
        problems.append("%s:%d: not as it was written" % (SUCCESS, line))
    if success["digest"] != success_digest(success):
        problems.append("%s: its digest does not match its content" % SUCCESS)
    if success["stop_reason"] not in STOP_REASONS:
        problems.append("%s: stop_reason %r is not one of %s"
                        % (SUCCESS, success["stop_reason"], ", ".join(STOP_REASONS)))
    return success, problems


def _first_difference(text: str, expected: str) -> int:
    pairs = zip(text.split("\n"), expected.split("\n"))
    return next((n for n, (a, b) in enumerate(pairs, 1) if a != b),
                min(text.count("\n"), expected.count("\n")) + 1)


def _check_hashes(folder: Path, success: dict, trusted: bool) -> list[str]:
    problems = []
    sums = ""
    if (folder / SUMS).is_file():
        sums = (folder / SUMS).read_bytes().decode("utf-8", "replace")
    else:
        problems.append("%s: missing" % SUMS)
    files = success.get("files") if trusted else None
    if files is None:  # SUCCESS.json is damaged: the list beside it still tells what else is
        files = {line[66:]: line[:64] for line in sums.splitlines() if line[66:] != SUCCESS}
    elif sums:
        expected = sums_text(files, sha256_file(folder / SUCCESS))
        if sums != expected:
            problems.append("%s:%d: not what SUCCESS.json says"
                            % (SUMS, _first_difference(sums, expected)))
    present = [name for name in evidence_files(folder) if name not in (SUCCESS, FAILED)]
    for name in sorted(set(files) - set(present)):
        problems.append("%s: missing, but SUCCESS.json lists it" % name)
    for name in present:
        if (folder / name).is_symlink():
            problems.append("%s: a link, not a file" % name)
        elif name not in files:
            if success.get("sealed") is not False or name not in WRITTEN_BY_RUNNER:
                problems.append("%s: not listed in SUCCESS.json" % name)
        elif sha256_file(folder / name) != files[name]:
            problems.append("%s: changed: its sha256 is not the one in SUCCESS.json" % name)
    for name in ("manifest.json", "verify.py"):
        if name not in files:
            problems.append("%s: not in the list of files of SUCCESS.json" % name)
    return problems


def _check_json(folder: Path, name: str) -> tuple[object, list[str]]:
    try:
        value = strict_json((folder / name).read_bytes().decode("utf-8"))
    except json.JSONDecodeError as error:
        return None, ["%s:%d: not JSON: %s" % (name, error.lineno, error.msg)]
    except ValueError as error:
        return None, ["%s: not JSON: %s" % (name, error)]
    if name not in SCHEMAS:
        return value, []
    if not isinstance(value, dict):
        return None, ["%s: must hold an object" % name]
    problems = ["%s: %s" % (name, fault) for fault in _faults(value, SCHEMAS[name])]
    for (owner, field), schema in LIST_ITEMS.items():
        if owner == name and isinstance(value.get(field), list):
            for index, item in enumerate(value[field]):
                found = _faults(item, schema) if isinstance(item, dict) else ["not an object"]
                problems += ["%s: %s[%d]: %s" % (name, field, index, fault) for fault in found]
    return value, problems


def _faults(value: dict, schema: dict) -> list[str]:
    faults = []
    for field, allowed in schema.items():
        name = field.rstrip("?")
        if name not in value:
            if not field.endswith("?"):
                faults.append("field %r is missing" % name)
        elif not any(_IS_TYPE[kind](value[name]) for kind in allowed.split("|")):
            faults.append("field %r must be %s, not %r"
                          % (name, allowed.replace("|", " or "), value[name]))
    return faults


def _check_manifest(manifest: object, success: dict) -> list[str]:
    if not isinstance(manifest, dict):
        return []  # missing or malformed: already said
    problems = []
    for field in ("run_id", "notebook", "started_at"):
        if field in success and manifest.get(field) != success[field]:
            problems.append("manifest.json: %s %r is not SUCCESS.json's %r"
                            % (field, manifest.get(field), success[field]))
    parameters, origins = manifest.get("parameters"), manifest.get("origins")
    if isinstance(parameters, dict) and isinstance(origins, dict):
        problems += ["manifest.json: parameter %r has no origin" % name
                     for name in sorted(set(parameters) - set(origins))]
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
    header = rows[0] if rows and rows[0].get("kind") == "header" else None
    if header is None:
        problems.append(_at(1, "the first row must be the header"))
    elif "run_id" in success and header.get("run_id") != success["run_id"]:
        problems.append(_at(1, "run_id %r is not SUCCESS.json's" % header.get("run_id")))
    return problems + _check_progress(rows, (header or {}).get("tokens_per_step"), success)


def _at(line: int, fault: str) -> str:
    return "%s:%d: %s" % (METRICS, line, fault)


def _parse_row(line: bytes) -> tuple[dict, str]:
    try:
        row = strict_json(line.decode("utf-8"))
    except ValueError as error:
        return {}, "not JSON: %s" % error
    if not isinstance(row, dict) or row.get("kind") not in ROWS:
        return {}, "kind must be one of %s" % ", ".join(ROWS)
    faults = _faults(row, ROWS[row["kind"]]) + _faults(row, {"row": "count", "previous": "sha256"})
    return ({}, faults[0]) if faults else (row, "")


def _check_chain(lines: list, rows: list, end: dict) -> list[str]:
    problems, broken = [], []
    for number, row in enumerate(rows, 1):
        if row and row["row"] != number:
            problems.append(_at(number, "holds row %d: lines were removed, added or moved"
                                % row["row"]))
            break
    hashes = [CHAIN_START] + [sha256_bytes(line) for line in lines]
    for number, row in enumerate(rows, 1):
        if row and row["previous"] != hashes[number - 1]:
            broken.append(number)
    if end and end.get("rows") != len(lines):
        problems.append(_at(len(lines), "%d lines, but SUCCESS.json counts %s"
                            % (len(lines), end.get("rows"))))
    if end and end.get("last_row_sha256") != hashes[-1]:
        broken.append(len(lines) + 1)
    for number in broken:  # a changed link breaks two joints, changed content only the next one
        if number - 1 not in broken:
            line = number if number + 1 in broken or number == 1 else number - 1
            problems.append(_at(line, "changed, or lines after it were removed: "
                                "the next link is not its sha256"))
    return problems


def _check_progress(rows: list, tokens_per_step: object, success: dict) -> list[str]:
    """Tokens, bits per byte, and clocks that never run back, across resumes."""
    problems = []
    step = {"train": -1, "eval": -1}
    elapsed, tokens = 0.0, None
    for number, row in enumerate(rows, 1):
        kind = row.get("kind")
        if kind == "event" and row["event"] == "resume":
            at = row.get("step", 0)
            step = {"train": at, "eval": min(at, step["eval"])}
            elapsed = row.get("elapsed_s", 0.0)
        if kind not in step:
            continue
        if type(tokens_per_step) is int and row["tokens"] != row["step"] * tokens_per_step:
            problems.append(_at(number, "tokens %d is not step %d x %d"
                                % (row["tokens"], row["step"], tokens_per_step)))
        if row["step"] < step[kind] + (kind == "train"):
            problems.append(_at(number, "step %d does not follow step %d with no resume between"
                                % (row["step"], step[kind])))
        if row["elapsed_s"] < elapsed:
            problems.append(_at(number, "elapsed_s runs back from %r to %r"
                                % (elapsed, row["elapsed_s"])))
        step[kind], elapsed = row["step"], row["elapsed_s"]
        if kind == "train":
            tokens = row["tokens"]
            if row["loss"] is None and row["finite"]:
                problems.append(_at(number, "loss is null although finite is true"))
        else:
            problems += [_at(number, fault) for fault in _bpb_faults(row)]
    if "final_step" in success and tokens is not None:
        last = (step["train"], tokens)
        if last != (success["final_step"], success.get("final_tokens")):
            problems.append("%s: final_step and final_tokens %r are not those of %s, %r" % (
                SUCCESS, (success["final_step"], success.get("final_tokens")), METRICS, last))
    return problems


def _bpb_faults(row: dict) -> list[str]:
    """bpb_est = ce / ln 2 / 4.2 and bpb_exact = exact_nats / ln 2 / bytes (nats of targets that
    have bytes). Without exact_nats only its upper bound, ce * target_tokens, can be checked."""
    faults = []
    if row["ce"] is None:
        return faults
    bits = row["ce"] / math.log(2)
    estimate = bits / ESTIMATED_BYTES_PER_TOKEN
    if not _close(row["bpb_est"], estimate):
        faults.append("bpb_est %r is not ce / ln 2 / 4.2 = %r" % (row["bpb_est"], estimate))
    exact = row.get("bpb_exact")
    if exact is None:
        return faults
    if not row.get("bytes"):
        return faults + ["bpb_exact without a count of bytes"]
    if row.get("exact_nats") is not None:
        value = row["exact_nats"] / math.log(2) / row["bytes"]
        if not _close(exact, value):
            faults.append("bpb_exact %r is not exact_nats / ln 2 / bytes = %r" % (exact, value))
    limit = bits * row["target_tokens"] / row["bytes"]
    if exact > limit * (1 + ARITHMETIC_TOLERANCE):
        faults.append("bpb_exact %r is above ce * target_tokens / ln 2 / bytes = %r"
                      % (exact, limit))
    return faults


def _close(value: object, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=ARITHMETIC_TOLERANCE)


def _check_notebook(folder: Path, success: dict, manifest: object) -> list[str]:
    """Every code cell of the sealed notebook ran, in order and without error, in this run."""
    if not (folder / NOTEBOOK).is_file():
        return ["%s: missing from a sealed run" % NOTEBOOK]
    notebook, problems = _check_json(folder, NOTEBOOK)
    if problems or not isinstance(notebook, dict):
        return []  # not JSON, or changed: already said
    count = 0
    for index, cell in enumerate(notebook.get("cells", []), 1):
        if cell.get("cell_type") != "code" or not "".join(cell.get("source", "")).strip():
            continue
        ran = cell.get("execution_count")
        if not isinstance(ran, int) or ran <= count:
            problems.append("%s: cell %d did not run, or not in order" % (NOTEBOOK, index))
        else:
            count = ran
        if any(out.get("output_type") == "error" for out in cell.get("outputs", [])):
            problems.append("%s: cell %d ended in an error" % (NOTEBOOK, index))
    times = notebook.get("metadata", {}).get("papermill", {})
    first, last = times.get("start_time"), times.get("end_time")
    if first and last and not (first[:19] <= success["started_at"][:19]
                               and success["finished_at"][:19] <= last[:19]):
        problems.append("%s: executed from %s to %s, not in this run" % (NOTEBOOK, first, last))
    return problems


def _check_checkpoint(folder: Path, success: dict) -> list[str]:
    """The last checkpoint's commit file and the files it lists, where checkpoints are present."""
    last = success.get("checkpoint")
    if not isinstance(last, dict) or not (folder / CHECKPOINTS).is_dir():
        return []
    name = "%s/commit.json" % last.get("path")
    if not (folder / name).is_file():
        return ["%s: missing" % name]
    if sha256_file(folder / name) != last.get("commit_sha256"):
        return ["%s: changed: its sha256 is not the one in SUCCESS.json" % name]
    problems = []
    files = strict_json((folder / name).read_text("utf-8")).get("files", {})
    for part, digest in files.items():
        path = (folder / name).parent / part
        wanted = digest.get("sha256") if isinstance(digest, dict) else digest
        if not path.is_file():
            problems.append("%s/%s: missing" % (last["path"], part))
        elif sha256_file(path) != wanted:
            problems.append("%s/%s: changed: its sha256 is not the one in commit.json"
                            % (last["path"], part))
    return problems


def main(arguments: list[str]) -> int:
    """Prints one line a run, and its problems. Returns 0 only if every run is verified."""
    failures = 0
    for folder in arguments or [os.path.dirname(os.path.abspath(__file__))]:
        problems = verify(folder)
        failures += bool(problems)
        print("%s  %s" % ("REFUSED" if problems else "VERIFIED", folder))
        for problem in problems[:20]:
            print("  " + problem)
        if len(problems) > 20:
            print("  and %d more" % (len(problems) - 20))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
