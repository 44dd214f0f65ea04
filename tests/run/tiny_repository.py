# SPDX-License-Identifier: Apache-2.0
"""A small repository in a temporary folder, with one notebook whose parameter says how it ends."""

import textwrap
from pathlib import Path

import nbformat
import yaml

from atomic_lib.run.jobs import Roots

REPOSITORY = Path(__file__).resolve().parents[2]

PARAMETERS = "run = 'smoke'\nending = 'succeed'"
OPEN = """
    from pathlib import Path
    from atomic_lib.evidence import RunFolder, zip_run
    folder = RunFolder.open(
        Path("outputs") / f"tiny-{run}", notebook="tiny", parameters={"run": run, "ending": ending},
        origins={"run": "file", "ending": "file"}, root=Path.cwd(),
    )
"""
# Trains twelve steps of a tenth of a second; with ending="wait" until it is told to stop.
TRAIN = """
    import os, signal, sys, time
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    folder.metrics.start(run_id=folder.run_id, tokens_per_step=8)
    done = sum(row["kind"] == "train" for row in folder.metrics.rows())
    if done:
        folder.metrics.append("event", event="resume", step=done, elapsed_s=done * 0.1)
    for step in range(done + 1, 13):
        folder.metrics.append(
            "train", step=step, tokens=8 * step, loss=4.0 - step / 10, lr=1e-3, grad_norm=1.0,
            finite=True, elapsed_s=step * 0.1,
        )
        folder.progress("train", step, 12, f"loss {4 - step / 10:.1f}")
        time.sleep(0.02)
        while ending == "wait" and step == 6 and not stopped:
            time.sleep(0.05)
        if stopped:
            folder.fail("interrupted by SIGTERM at step %d" % step)
            raise KeyboardInterrupt("SIGTERM")
    if ending == "exit":
        sys.exit(0)
    if ending == "die":
        os._exit(1)
    if ending == "raise":
        raise ValueError("the loss of step 12 is too high")
"""
SUCCEED = """
    if ending != "forget":
        folder.succeed("max_steps", final_loss=2.8)
        zip_run(folder.path)
"""
AFTER = "if ending == 'raise after success':\n    raise ValueError('the last cell failed')"


def write_notebook(path: Path) -> None:
    """Writes the notebook with a tagged parameters cell and no outputs."""
    sources = [PARAMETERS, OPEN, TRAIN, SUCCEED, AFTER]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell("# Tiny")]
    notebook.cells += [nbformat.v4.new_code_cell(textwrap.dedent(s).strip()) for s in sources]
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)


def write_parameters(roots: Roots, run: str, **values: object) -> str:
    """Writes params/tiny/<run>.yaml and returns the job's name."""
    folder = roots.root / "params" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run}.yaml").write_text(yaml.safe_dump({"run": run, **values}))
    return f"tiny/{run}"
