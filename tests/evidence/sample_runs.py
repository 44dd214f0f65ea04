# SPDX-License-Identifier: Apache-2.0
"""Runs made through the public interface, for the tests to damage."""

import math
from pathlib import Path

import nbformat

from atomic_lib.evidence import RunFolder, seal

TOKENS_PER_STEP = 64


def open_run(root: Path, name: str = "train-smoke") -> RunFolder:
    """Opens outputs/<name> under `root` with two parameters."""
    return RunFolder.open(
        root / "outputs" / name,
        notebook="train",
        parameters={"run": "smoke", "init_seed": 1},
        origins={"run": "file", "init_seed": "default"},
        root=root,
    )


def train_fields(step: int) -> dict[str, object]:
    """A well-formed train row."""
    return {
        "step": step, "tokens": step * TOKENS_PER_STEP, "loss": 5.0 - step / 100, "lr": 3e-4,
        "grad_norm": 1.5, "finite": True, "skipped": False, "elapsed_s": step * 0.5,
    }  # fmt: skip


def eval_fields(step: int) -> dict[str, object]:
    """A well-formed eval row: 100 targets of 2.5 nats, 96 of which have 400 bytes together."""
    return {
        "step": step, "tokens": step * TOKENS_PER_STEP, "ce": 2.5,
        "bpb_est": 2.5 / math.log(2) / 4.2, "exact_nats": 240.0, "bytes": 400,
        "bpb_exact": 240.0 / math.log(2) / 400, "target_tokens": 100, "batches": 2,
        "elapsed_s": step * 0.5,
    }  # fmt: skip


def write_executed_notebook(run: RunFolder) -> None:
    """A notebook of two executed cells, as papermill leaves it."""
    notebook = nbformat.v4.new_notebook()
    output = nbformat.v4.new_output("stream", name="stdout", text="loss 4.9\n")
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# Trains"),
        nbformat.v4.new_code_cell("1 + 1", execution_count=1),
        nbformat.v4.new_code_cell("print('loss 4.9')", execution_count=2, outputs=[output]),
    ]
    nbformat.write(notebook, run.path / "notebook.ipynb")


def make_run(root: Path, steps: int = 12) -> Path:
    """A sealed run with every kind of evidence file; returns its folder."""
    run = open_run(root)
    run.write_json("runtime-preflight.json", {"checks": [{"check": "devices", "ok": True}]})
    for name in ("provenance.json", "training_args.json", "config.json"):
        run.write_json(name, {"value": 1})
    tensor = {"name": "embedding", "shape": [4, 2], "dtype": "float32", "sha256": "0" * 64}
    export = {"schema": "1", "source": {}, "files": {}, "tensors": [tensor]}
    run.write_json("train-smoke/export.json", export)
    model = {"run_id": "train-smoke", **eval_fields(steps)}
    evaluation = {"schema": "1", "source": "export-smoke", "models": [model]}
    run.write_json("evaluation.json", evaluation)
    run.metrics.start(run_id=run.run_id, tokens_per_step=TOKENS_PER_STEP)
    for step in range(1, steps + 1):
        run.metrics.append("train", **train_fields(step))
    run.metrics.append("eval", **eval_fields(steps))
    (run.path / "figures").mkdir()
    (run.path / "figures" / "loss.png").write_bytes(bytes(range(256)))
    run.succeed("max_steps", bpb_exact=0.87)
    write_executed_notebook(run)
    (run.path / "report.html").write_text("<p>loss 4.9</p>\n")
    seal(run.path)
    return run.path
