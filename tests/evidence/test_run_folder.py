# SPDX-License-Identifier: Apache-2.0
"""A run folder opens clean, says what made it, records failure, and closes once.

Oracle: the files in the folder, read with the json module, and facts that the test made itself
(a git repository with a known commit, files with known bytes, processes that it started).
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sample_runs import open_run, write_executed_notebook

from atomic_lib.evidence import RunFolder, verify, zip_run
from atomic_lib.evidence import files as files_module
from atomic_lib.evidence import manifest as manifest_module
from atomic_lib.evidence.__main__ import main
from atomic_lib.evidence.report import write_report

REPOSITORY = Path(__file__).resolve().parents[2]


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_opening_again_removes_the_old_result_and_keeps_the_record(sealed_run: Path):
    zip_run(sealed_run)
    (sealed_run / "FAILED.json").write_text("{}")
    (sealed_run / ".config.json.tmp").write_text("half")
    metrics = (sealed_run / "metrics.jsonl").read_bytes()
    open_run(sealed_run.parents[1])
    names = {path.name for path in sealed_run.iterdir()}
    assert names.isdisjoint(
        {"SUCCESS.json", "FAILED.json", "SHA256SUMS", "report.html", ".config.json.tmp"}
    )
    assert (sealed_run / "metrics.jsonl").read_bytes() == metrics
    assert not sealed_run.with_name("train-smoke.zip").exists()
    assert verify(sealed_run) == ["SUCCESS.json: missing: the run did not finish"]


def test_success_says_which_files_an_earlier_session_left(sealed_run: Path):
    run = open_run(sealed_run.parents[1])
    run.write_json("config.json", {"value": 2})
    success = run.succeed("completed")
    assert "evaluation.json" in success["earlier_files"]
    assert "config.json" not in success["earlier_files"]
    assert "notebook.ipynb" not in success["files"]
    assert verify(run.path) == []


def test_manifest_holds_parameters_source_git_packages_and_inputs(tmp_path: Path):
    root = tmp_path / "repository"
    (root / "atomic_lib").mkdir(parents=True)
    (root / "atomic_lib" / "a.py").write_text("A = 1\n")
    (root / "atomic_lib" / "a.pyc").write_bytes(b"\0")
    data = tmp_path / "tokens.bin"
    data.write_bytes(b"\1\0" * 50)
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    run = open_run(root)
    run.record_inputs(data, root / "atomic_lib" / "a.py")
    manifest = read(run.path / "manifest.json")
    source = hashlib.sha256(b"A = 1\n").hexdigest()
    assert manifest["parameters"] == {"run": "smoke", "init_seed": 1}
    assert manifest["origins"] == {"run": "file", "init_seed": "default"}
    assert manifest["seeds"] == {"init_seed": 1}
    assert manifest["git"] == {"commit": commit, "dirty": False}
    assert manifest["source"]["files"] == {"atomic_lib/a.py": source}
    listing = f"{source}  atomic_lib/a.py\n".encode()
    assert manifest["source"]["sha256"] == hashlib.sha256(listing).hexdigest()
    assert manifest["packages"]["pytest"] == pytest.__version__
    assert manifest["inputs"] == [
        {"path": str(data), "bytes": 100, "method": "sha256",
         "digest": hashlib.sha256(b"\1\0" * 50).hexdigest()},
        {"path": "atomic_lib/a.py", "bytes": 6, "method": "sha256", "digest": source},
    ]  # fmt: skip
    (root / "atomic_lib" / "a.py").write_text("A = 2\n")
    assert manifest_module.git_state(root) == {"commit": commit, "dirty": True}
    assert manifest_module.git_state(tmp_path) == {"commit": None, "dirty": None}


def test_devices_are_those_that_jax_sees(new_run):
    import jax

    run = new_run()
    run.record_devices()
    facts = read(run.path / "manifest.json")["devices"]
    assert (facts["jax"], facts["backend"]) == (jax.__version__, jax.default_backend())
    assert [device["id"] for device in facts["devices"]] == [d.id for d in jax.devices()]
    run.succeed("completed")
    assert verify(run.path) == []


def test_parameter_without_origin_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no origin for learning_rate"):
        RunFolder.open(
            tmp_path / "outputs" / "a-b", notebook="a", parameters={"learning_rate": 1.0},
            origins={}, root=tmp_path,
        )  # fmt: skip


def test_large_inputs_are_sampled_and_the_method_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files_module, "FULL_HASH_BYTES", 1000)
    monkeypatch.setattr(files_module, "SAMPLE_BYTES", 10)
    path = tmp_path / "big.bin"
    path.write_bytes(bytes(i % 251 for i in range(2000)))
    method, digest = files_module.input_digest(path)
    assert "64 evenly spaced pieces" in method
    for position in (0, 1999):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        changed = files_module.input_digest(path)[1]
        assert changed != digest, f"a change at byte {position} is not seen"
        digest = changed


@pytest.mark.parametrize("error", [ValueError("loss is nan"), SystemExit(0), KeyboardInterrupt()])
def test_recording_writes_failed_and_raises_on(new_run, error: BaseException):
    run = new_run()
    with pytest.raises(type(error)), run.recording():
        raise error
    record = read(run.path / "FAILED.json")
    assert record["reason"].startswith(type(error).__name__)
    assert any("raise error" in line for line in record["traceback"])
    with pytest.raises(RuntimeError, match=r"FAILED\.json is there"):
        run.succeed("completed")
    with run.recording():
        pass
    run.succeed("completed")
    assert verify(run.path) == []


def test_failure_after_success_takes_the_success_and_its_zip_back(new_run):
    run = new_run()
    run.succeed("completed")
    archive = zip_run(run.path)
    run.fail("the last cell failed")
    assert not archive.exists()
    assert verify(run.path) == [
        "FAILED.json: the run failed: the last cell failed",
        "SUCCESS.json: missing: the run did not finish",
    ]


def test_closed_run_refuses_more_files_and_stays_verified(new_run):
    run = new_run()
    run.succeed("completed")
    for write in (lambda: run.write_json("more.json", {}), lambda: run.succeed("completed")):
        with pytest.raises(RuntimeError, match="has succeeded and its files are sealed"):
            write()
    assert verify(run.path) == []


def test_mistaken_names_and_reasons_are_refused(new_run):
    run = new_run()
    with pytest.raises(ValueError, match="outside the run folder"):
        run.write_json("../elsewhere.json", {})
    with pytest.raises(ValueError, match="stop_reason: 'done' is not one of completed, time"):
        run.succeed("done")
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        run.write_json("config.json", {"value": object()})
    assert not (run.path / "config.json").exists()


def test_non_finite_results_are_null_and_marked(new_run):
    run = new_run()
    success = run.succeed("completed", losses={"validation": float("nan"), "train": 2.0})
    assert success["results"] == {"losses": {"validation": None, "train": 2.0, "nonfinite": True}}
    assert verify(run.path) == []


def test_failed_write_leaves_the_old_file_whole(new_run, monkeypatch):
    run = new_run()
    run.write_json("config.json", {"value": 1})
    before = (run.path / "config.json").read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.write_json("config.json", {"value": 2})
    assert (run.path / "config.json").read_bytes() == before


def test_figure_is_a_png_with_the_same_bytes_each_time(new_run):
    from matplotlib.figure import Figure

    run = new_run()
    figure = Figure()
    figure.add_subplot().plot([1, 2, 3])
    first = run.save_figure("loss", figure).read_bytes()
    assert first.startswith(b"\x89PNG")
    assert run.save_figure("loss", figure).read_bytes() == first


def test_heartbeat_is_written_once_a_second_and_at_each_stage(new_run, monkeypatch):
    run = new_run()
    now = [100.0]
    monkeypatch.setattr("atomic_lib.evidence.run_folder.time.monotonic", lambda: now[0])
    seen = []
    for seconds, stage, done in [
        (0.0, "train", 1), (0.5, "train", 2), (1.1, "train", 3), (1.2, "eval", 0), (1.3, "eval", 9),
    ]:  # fmt: skip
        now[0] = 100.0 + seconds
        run.progress(stage, done, 9, "text")
        beat = read(run.path / "heartbeat.json")
        seen.append((beat["stage"], beat["done"]))
    assert seen == [("train", 1), ("train", 1), ("train", 3), ("eval", 0), ("eval", 9)]


def test_second_writer_is_refused_until_the_first_process_is_gone(tmp_path: Path):
    source = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from sample_runs import open_run\n"
        "open_run(Path(sys.argv[1]))\n"
        "print('open', flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", source, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(RuntimeError, match=f"written by process {process.pid}"):
            open_run(tmp_path)
    finally:
        process.kill()
        process.communicate()
    open_run(tmp_path).succeed("completed")
    assert verify(tmp_path / "outputs" / "train-smoke") == []


def test_finished_run_is_free_for_another_process_while_this_one_idles(new_run):
    run = new_run()
    source = (
        "import sys; from pathlib import Path; from atomic_lib.evidence.lock import locked_by\n"
        "print(locked_by(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", source, str(run.path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    owners = [subprocess.check_output(command, env=environment, text=True).strip()]
    run.succeed("completed")
    owners.append(subprocess.check_output(command, env=environment, text=True).strip())
    assert owners == [str(os.getpid()), ""]


def test_importing_evidence_loads_no_jax_and_no_numpy():
    source = (
        "import sys, atomic_lib.evidence\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax', 'matplotlib', 'nbformat', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["verify", "zip", "seal"])
def test_command_line_accepts_good_runs_and_refuses_bad_ones(
    new_run, command: str, capsys: pytest.CaptureFixture[str]
):
    run = new_run()
    run.write_json("config.json", {"value": 1})
    run.succeed("completed")
    write_executed_notebook(run)
    assert main([command, str(run.path)]) == 0
    assert (run.path / "report.html").exists() == (command == "seal")
    assert read(run.path / "SUCCESS.json")["sealed"] == (command == "seal")
    assert run.path.with_name("train-smoke.zip").exists() == (command == "zip")
    assert verify(run.path) == []
    (run.path / "config.json").write_text('{"value": 3}')
    assert main([command, str(run.path)]) == 1
    printed = capsys.readouterr()
    assert "config.json: changed" in printed.out + printed.err


def test_report_shows_outputs_without_code_and_needs_no_network(new_run):
    run = new_run()
    write_executed_notebook(run)
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "loss 4.9" in page
    assert "print(" not in page
    assert "http://" not in page
    assert "https://" not in page
