# SPDX-License-Identifier: Apache-2.0
"""A training run without a notebook, in as many processes as the launcher has started.

It does what the cells of a training notebook do. A process other than the first keeps its run
folder in a temporary place of its own, which goes with it: nothing there is evidence.
"""

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path

from atomic_lib.config import LoadedConfig, TrainConfig, load_config
from atomic_lib.data import TokenDataset, open_run_dataset
from atomic_lib.evidence import RunFolder
from atomic_lib.evidence.verify import CHECKPOINTS, METRICS
from atomic_lib.hosts.processes import is_first, join_cluster, together, wait_for_all
from atomic_lib.notebook.figures import training_curves
from atomic_lib.notebook.session import Session
from atomic_lib.preflight import check_runtime
from atomic_lib.train import TrainResult, require_improvement, train


def run_training(name: str, root: Path) -> TrainResult:
    """Trains the parameter file `name` ("train/berlm_hyb16") in outputs/<notebook>-<run>/.

    Every process of the run calls this with the same arguments; root's outputs/ must be the same
    folder for all of them. Raises as `load_config`, `check_runtime` and `train` do.
    """
    session = Session.begin(root)
    notebook, _, run_name = name.partition("/")
    loaded = load_config(notebook, {"run": run_name}, root=root)
    if not isinstance(loaded.config, TrainConfig):
        raise ValueError(f"{name!r} trains nothing; give one of params/train*/")
    session.require_accelerator(loaded)
    cluster = join_cluster()
    if cluster is not None:
        print(f"process {cluster.process} of {cluster.processes}, joined by {cluster.launcher}")
    return train_job(session, loaded)


def train_job(session: Session, loaded: LoadedConfig) -> TrainResult:
    """The run itself, once the processes are joined."""
    config = loaded.config
    assert isinstance(config, TrainConfig)
    run = open_process_folder(session, loaded)
    if not is_first():
        config = dataclasses.replace(config, trackers=())  # one run is watched once
    dataset = _open_dataset(run, config, session.root)
    together(
        lambda: check_runtime(run, config, dataset), "pass its preflight checks", first_only=True
    )
    result = train(run, config, dataset, started_at=session.started_at)
    together(lambda: _finish(run, result), "write the evidence", first_only=True)
    return result


def _finish(run: RunFolder, result: TrainResult) -> None:
    with run.recording():
        run.save_figure("training", training_curves(run.metrics.rows(), title=run.run_id))
        require_improvement(result)
    run.succeed(**result.summary())


def open_process_folder(session: Session, loaded: LoadedConfig) -> RunFolder:
    """The run's folder in the first process; elsewhere a temporary one that begins as its copy.

    The copy has the rows of earlier sessions, so that every process knows what was evaluated.
    """
    shared = session.outputs / loaded.run_id
    if is_first():
        wait_for_all("the record was copied")
        return session.start_run(loaded)
    scratch = Path(tempfile.mkdtemp(prefix="atomic-process-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    own = scratch / loaded.run_id
    own.mkdir()
    if (shared / METRICS).is_file():
        shutil.copyfile(shared / METRICS, own / METRICS)
    wait_for_all("the record was copied")
    run = dataclasses.replace(session, output_folder=scratch).start_run(loaded)
    run.checkpoints = shared / CHECKPOINTS
    return run


def _open_dataset(run: RunFolder, config: TrainConfig, root: Path) -> TokenDataset:
    """The first process builds what is not there yet; the others open it afterwards."""
    opened = together(
        lambda: open_run_dataset(run, config, root=root), "open the dataset", first_only=True
    )
    return opened or open_run_dataset(run, config, root=root)
