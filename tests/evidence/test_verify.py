# SPDX-License-Identifier: Apache-2.0
"""A sealed run verifies; any change to it is refused, and the changed file is named.

Oracle: the tests damage files themselves, by brute force, so they know which file is wrong
without asking the code under test. Hash and JSON formats are checked by sha256sum and by the json
module. Forged rows below are re-sealed, so that only the content can give them away.
"""

import ast
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from sample_runs import (
    TOKENS_PER_STEP,
    eval_fields,
    make_run,
    open_run,
    train_fields,
    write_executed_notebook,
)

from atomic_lib.evidence import RunFolder, seal, verify, zip_run

EVIDENCE = (
    "SHA256SUMS", "SUCCESS.json", "config.json", "evaluation.json", "figures/loss.png",
    "manifest.json", "metrics.jsonl", "notebook.ipynb", "provenance.json", "report.html",
    "runtime-preflight.json", "train-smoke/export.json", "training_args.json", "verify.py",
)  # fmt: skip
FLIPS_PER_FILE = 40


def files_named(problems: list[str]) -> set[str]:
    return {problem.split(":")[0] for problem in problems}


def test_sealed_run_is_verified_and_complete(sealed_run: Path):
    present = sorted(p.relative_to(sealed_run).as_posix() for p in sealed_run.rglob("*.*"))
    listed = [line[66:] for line in (sealed_run / "SHA256SUMS").read_text().splitlines()]
    ignored = {"SHA256SUMS", "heartbeat.json", ".lock"}
    assert verify(sealed_run) == []
    assert sorted(listed) == sorted(set(present) - ignored)
    assert set(EVIDENCE) == {*listed, "SHA256SUMS"}
    for name in listed:
        digest = hashlib.sha256((sealed_run / name).read_bytes()).hexdigest()
        assert f"{digest}  {name}\n" in (sealed_run / "SHA256SUMS").read_text()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("evaluation.json", lambda v: v["models"][0].update(bpb_est=0.8), "bpb_est is not ce"),
        ("evaluation.json", lambda v: v.update(models={}), "field 'models' must be list"),
        ("train-smoke/export.json", lambda v: v["tensors"][0].update(name=""), "tensors 1: field"),
        ("runtime-preflight.json", lambda v: v["checks"][0].update(ok=1), "'ok' must be flag"),
        ("manifest.json", lambda v: v.update(started_at="today"), "'started_at' must be time"),
        ("manifest.json", lambda v: v["origins"].pop("run"), "parameter 'run' has no origin"),
        ("manifest.json", lambda v: v.update(run_id="other"), "run_id is not the 'train-smoke'"),
        ("config.json", lambda v: v.update(value=float("nan")), "NaN is not JSON"),
    ],
)
def test_fields_are_checked_also_where_hashes_would_fit(sealed_run: Path, name, change, message):
    value = json.loads((sealed_run / name).read_text())
    change(value)
    (sealed_run / name).write_text(json.dumps(value))
    assert any(p.startswith(f"{name}: ") and message in p for p in verify(sealed_run))


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs the sha256sum program")
def test_sums_satisfy_sha256sum(sealed_run: Path):
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=sealed_run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", EVIDENCE)
def test_one_flipped_byte_is_refused_and_its_file_named_first(sealed_run: Path, name: str):
    original = (sealed_run / name).read_bytes()
    chance = random.Random(name)
    for _ in range(FLIPS_PER_FILE):
        position, mask = chance.randrange(len(original)), chance.randrange(1, 256)
        damaged = bytearray(original)
        damaged[position] ^= mask
        (sealed_run / name).write_bytes(damaged)
        problems = verify(sealed_run)
        assert problems, f"byte {position} ^ {mask} of {name} passed"
        assert problems[0].split(":")[0] == name, (position, mask, problems)
    (sealed_run / name).write_bytes(original)
    assert verify(sealed_run) == []


@pytest.mark.parametrize("name", EVIDENCE)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "one byte more"])
def test_damaged_file_is_named_first(sealed_run: Path, name: str, damage: str):
    path, data = sealed_run / name, (sealed_run / name).read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        new = {"empty": b"", "truncated": data[: len(data) // 2], "one byte more": data + b"\n"}
        path.write_bytes(new[damage])
    problems = verify(sealed_run)
    assert problems
    assert problems[0].split(":")[0] == name, problems


def test_flipped_byte_in_metrics_names_its_line(sealed_run: Path):
    path = sealed_run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        at = line.index(b'"step"') + 8 if b'"step"' in line else line.index(b"smoke")
        damaged = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        path.write_bytes(b"".join([*lines[: number - 1], damaged, *lines[number:]]))
        named = [p for p in verify(sealed_run) if "chain" in p]
        assert [p.split(":")[:2] for p in named] == [["metrics.jsonl", str(number)]], named


def test_any_deleted_line_of_metrics_is_refused_with_its_number(sealed_run: Path):
    path = sealed_run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
        problems = verify(sealed_run)
        near = min(number, len(lines) - 1)
        assert f"metrics.jsonl:{near}" in " ".join(problems), (number, problems)
        assert f"the last line, but SUCCESS.json counts {len(lines)}" in " ".join(problems)


def test_swapped_and_repeated_lines_are_refused(sealed_run: Path):
    path = sealed_run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in ([*lines[:4], lines[5], lines[4], *lines[6:]], [*lines[:5], *lines[4:]]):
        path.write_bytes(b"".join(changed))
        assert "metrics.jsonl" in files_named(verify(sealed_run))


def test_missing_success_and_present_failure_are_refused(sealed_run: Path, tmp_path: Path):
    (sealed_run / "SUCCESS.json").unlink()
    assert verify(sealed_run) == ["SUCCESS.json: missing: the run did not finish"]
    other = make_run(tmp_path / "other")
    record = {
        "schema": "atomic-failed/1", "run_id": "train-smoke", "reason": "the disk is full",
        "failed_at": "2026-01-01T00:00:00Z", "traceback": [], "recorded_by": "kernel",
    }  # fmt: skip
    (other / "FAILED.json").write_text(json.dumps(record))
    assert verify(other) == ["FAILED.json: the run failed: the disk is full"]
    assert verify(tmp_path / "none") == [f"{tmp_path / 'none'}: no such run folder"]


@pytest.mark.parametrize("name", ["notes.txt", "figures/other.png", "sub/metrics.jsonl"])
def test_extra_file_is_refused_and_named(sealed_run: Path, name: str):
    (sealed_run / name).parent.mkdir(exist_ok=True)
    (sealed_run / name).write_text("more\n")
    assert verify(sealed_run) == [f"{name}: not listed in SUCCESS.json"]


def test_link_in_place_of_a_file_is_refused(sealed_run: Path, tmp_path: Path):
    shutil.move(sealed_run / "config.json", tmp_path / "config.json")
    (sealed_run / "config.json").symlink_to(tmp_path / "config.json")
    assert verify(sealed_run) == ["config.json: a link, not a file"]


def test_live_state_and_viewer_files_are_not_evidence(sealed_run: Path):
    (sealed_run / "heartbeat.json").unlink()
    (sealed_run / ".ipynb_checkpoints").mkdir()
    (sealed_run / ".ipynb_checkpoints" / "notebook-checkpoint.ipynb").write_text("{}")
    assert verify(sealed_run) == []


def forged(root: Path, kind: str, changes: dict[str, object]) -> list[str]:
    """Problems of a run whose writer put `changes` into one row before everything was hashed."""
    run = open_run(root)
    run.metrics.start(run_id=run.run_id, tokens_per_step=TOKENS_PER_STEP)
    for number in range(1, 6):
        changed = changes if (kind, number) == ("train", 3) else {}
        run.metrics.append("train", **(train_fields(number) | changed))
    run.metrics.append("eval", **(eval_fields(5) | (changes if kind == "eval" else {})))
    run.succeed("max_steps")
    return verify(run.path)


FORGERIES = {
    "tokens": ("train", {"tokens": 193}, 4, "tokens is not step 3 x 64"),
    "step repeated": ("train", {"step": 2, "tokens": 128}, 4, "step 2 comes after 2"),
    "clock runs back": ("train", {"elapsed_s": 0.9}, 4, "elapsed_s runs back"),
    "loss hidden": ("train", {"loss": math.nan}, 4, "loss is null although finite is true"),
    "string number": ("train", {"lr": "3e-4"}, 4, "'lr' must be number, not '3e-4'"),
    "negative step": ("train", {"step": -3, "tokens": -192}, 4, "'step' must be count"),
    "estimate": ("eval", {"bpb_est": 0.8}, 7, "bpb_est is not ce / ln 2 / 4.2"),
    "exact": ("eval", {"bpb_exact": 0.8}, 7, "bpb_exact is not exact_nats / ln 2 / bytes"),
    "exact bound": (
        "eval", {"exact_nats": None, "bpb_exact": 0.91}, 7, "bpb_exact is above ce * target_tokens",
    ),
    "no bytes": ("eval", {"bytes": None}, 7, "bpb_exact without a count of bytes"),
}  # fmt: skip


def test_honest_rows_of_the_forger_are_verified(tmp_path: Path):
    assert forged(tmp_path, "none", {}) == []


@pytest.mark.parametrize("name", FORGERIES)
def test_consistently_hashed_forgery_is_refused_with_its_line(tmp_path: Path, name: str):
    kind, changes, line, message = FORGERIES[name]
    problems = forged(tmp_path, kind, changes)
    assert any(p.startswith(f"metrics.jsonl:{line}: ") and message in p for p in problems), problems


def test_rows_after_a_resume_may_repeat_steps_and_clock(new_run):
    run = new_run()
    run.metrics.start(run_id=run.run_id, tokens_per_step=TOKENS_PER_STEP)
    for step in (1, 2, 3, 4):
        run.metrics.append("train", **train_fields(step))
    run.metrics.append("event", event="resume", step=2, elapsed_s=1.0)
    for step in (3, 4, 5):
        run.metrics.append("train", **train_fields(step))
    success = run.succeed("max_steps")
    assert (success["final_step"], success["final_tokens"]) == (5, 5 * TOKENS_PER_STEP)
    assert verify(run.path) == []


def resealed(path: Path, change) -> list[str]:
    """Problems after `change` edits the notebook of an unsealed copy and the run is sealed."""
    notebook = json.loads((path / "notebook.ipynb").read_text())
    change(notebook)
    (path / "notebook.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(ValueError, match="not verified") as error:
        seal(path)
    return str(error.value).split("; ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n["cells"][2].update(execution_count=None), "cell 3 did not run"),
        (lambda n: n["cells"][1].update(execution_count=9), "cell 3 did not run, or not in order"),
        (
            lambda n: n["cells"][1]["outputs"].append(
                {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
            ),
            "cell 2 ended in an error",
        ),
        (
            lambda n: n["metadata"].update(
                papermill={"start_time": "2020-01-01T00:00:00", "end_time": "2020-01-01T00:01:00"}
            ),
            "not in this run",
        ),
    ],
    ids=["not executed", "out of order", "error output", "another run's"],
)
def test_seal_refuses_a_notebook_that_did_not_make_the_run(new_run, change, message: str):
    run = new_run()
    run.succeed("completed")
    write_executed_notebook(run)
    problems = resealed(run.path, change)
    assert any("notebook.ipynb" in p and message in p for p in problems), problems


def test_unsealed_run_verifies_while_its_notebook_is_still_being_written(new_run):
    run = new_run()
    run.succeed("completed")
    (run.path / "notebook.ipynb").write_text("{")
    assert verify(run.path) == []


def save_checkpoint(run: RunFolder, step: int) -> Path:
    folder = run.path / "checkpoints" / f"{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.bin").write_bytes(b"weights" * step)
    digest = hashlib.sha256((folder / "state.bin").read_bytes()).hexdigest()
    commit = {"step": step, "files": {"state.bin": digest}}
    (folder / "commit.json").write_text(json.dumps(commit))
    return folder


@pytest.mark.parametrize("name", ["state.bin", "commit.json"])
def test_last_checkpoint_is_checked_where_present(new_run, name: str):
    run = new_run()
    save_checkpoint(run, 9)
    last = save_checkpoint(run, 10)
    success = run.succeed("time")
    assert success["checkpoint"]["path"] == "checkpoints/00000010"
    assert verify(run.path) == []
    data = bytearray((last / name).read_bytes())
    data[5] ^= 1
    (last / name).write_bytes(data)
    assert [p.split(": ")[:2] for p in verify(run.path)] == [
        [f"checkpoints/00000010/{name}", "changed"]
    ]
    shutil.rmtree(run.path / "checkpoints")
    assert verify(run.path) == []


def test_zip_verifies_in_an_empty_folder_with_bare_python(sealed_run: Path, tmp_path: Path):
    archive = zip_run(sealed_run)
    assert archive == sealed_run.with_name("train-smoke.zip")
    fresh = tmp_path / "fresh"
    with zipfile.ZipFile(archive) as opened:
        assert set(opened.namelist()) == set(EVIDENCE)
        opened.extractall(fresh)
    command = [sys.executable, "-S", "-I", "verify.py"]
    done = subprocess.run(command, cwd=fresh, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "VERIFIED"), done.stdout + done.stderr
    (fresh / "config.json").write_text('{"value": 2}')
    done = subprocess.run(command, cwd=fresh, capture_output=True, text=True)
    assert done.returncode == 1
    assert "config.json: changed" in done.stdout


def test_zip_is_the_same_bytes_every_time_and_refuses_a_damaged_run(sealed_run: Path):
    first = zip_run(sealed_run).read_bytes()
    (sealed_run / "config.json").touch()
    assert zip_run(sealed_run).read_bytes() == first
    (sealed_run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: changed"):
        zip_run(sealed_run)


def test_65_000_rows_verify_in_5_seconds_of_processor_time(new_run):
    run = new_run()
    rows = [{"kind": "header", "schema": "1", "run_id": run.run_id, "tokens_per_step": 64}]
    rows += [{"kind": "train", **train_fields(step), "mfu": 0.31} for step in range(1, 65_001)]
    previous = "0" * 64
    with open(run.path / "metrics.jsonl", "wb") as file:  # the format, written by hand
        for number, row in enumerate(rows, 1):
            line = json.dumps({"row": number, **row, "previous": previous}).encode()
            previous = hashlib.sha256(line).hexdigest()
            file.write(line + b"\n")
    run.succeed("max_steps")
    began = time.process_time()
    problems = verify(run.path)
    seconds = time.process_time() - began
    assert problems == []
    assert seconds < 5.0


def test_verify_source_is_one_file_for_python_3_8_and_the_standard_library(sealed_run: Path):
    tree = ast.parse((sealed_run / "verify.py").read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert {"json", "hashlib"} <= imported
    assert imported <= set(sys.stdlib_module_names)
