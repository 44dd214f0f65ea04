# SPDX-License-Identifier: Apache-2.0
"""`train`: begins or resumes a run, trains to its end, and says how it ended."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.evidence import RunFolder, effective_rows, read_rows
from atomic_lib.evidence.verify import CHECKPOINTS, METRICS, sha256_file
from atomic_lib.train.budget import Budget
from atomic_lib.train.checkpoint import COMMIT, Checkpoint, CheckpointStore, state_bytes
from atomic_lib.train.evaluation import Validation
from atomic_lib.train.interrupts import StopSignals
from atomic_lib.train.loop import Loop, last_step
from atomic_lib.train.optimizer import describe_groups
from atomic_lib.train.program import Program, build_program, resume_config
from atomic_lib.train.record import OnProgress, Record
from atomic_lib.train.result import TrainResult
from atomic_lib.train.schedule import RecordedSchedule, schedule_from_config

# A spike passes within a step or two; ten bad steps in a row are a run that has diverged.
MAX_SKIPPED_IN_A_ROW = 10


def train(
    run: RunFolder,
    config: TrainConfig,
    dataset: TokenDataset,
    *,
    clock: Callable[[], float] = time.monotonic,
    started_at: float | None = None,
    resume_from: Sequence[Path] = (),
    replay: Path | None = None,
    max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
    on_progress: OnProgress | None = None,
) -> TrainResult:
    """Trains `config` in the run folder `run` until its time, steps or tokens are used up.

    Resumes from the newest valid checkpoint in the run folder or in `resume_from` (run folders of
    earlier sessions, or folders that hold them; only read). `clock` returns seconds and
    `started_at` is its value when the session's first cell ran (now, if None). `replay` is a
    metrics.jsonl whose learning rates are used again. `on_progress` gets the rows so far every few
    seconds. Training starts with an evaluation of step 0 and ends with one of the last step.

    Raises ConfigMismatchError for a checkpoint of another configuration, TrainingInterrupted after
    SIGTERM or SIGINT, NonFiniteError after `max_skipped_in_a_row` bad steps; FAILED.json is written
    for each.
    """
    started_at = clock() if started_at is None else started_at
    with run.recording(), StopSignals() as signals:
        run.progress("preparing", 0, 0, "building the model")
        program = build_program(config)
        store = CheckpointStore(
            folder=run.path / CHECKPOINTS,
            config=resume_config(config, dataset.manifest),
            keep=config.keep_checkpoints,
            others=_checkpoint_folders(run.run_id, resume_from),
        )
        checkpoint = store.newest_valid()
        record = _begin_record(run, config, program, store, checkpoint, clock, on_progress)
        schedule = (
            schedule_from_config(config)
            if replay is None
            else RecordedSchedule.from_rows(effective_rows(read_rows(replay)))
        )
        loop = Loop(
            config=config,
            dataset=dataset,
            program=program,
            validation=Validation.of(config, dataset, program.placement, program.evaluate),
            schedule=schedule,
            store=store,
            budget=_budget(config, program, checkpoint, clock, started_at),
            record=record,
            state=checkpoint.restore(program.abstract_state) if checkpoint else program.start(),
            step=checkpoint.step if checkpoint else 0,
            saved=checkpoint if checkpoint and checkpoint.path.is_relative_to(run.path) else None,
            max_skipped_in_a_row=max_skipped_in_a_row,
            signals=signals,
        )
        return _result(loop, loop.run(), resumed=checkpoint)


def _checkpoint_folders(run_id: str, places: Sequence[Path]) -> list[Path]:
    """The checkpoint folders of run `run_id` in or below `places`.

    Raises FileNotFoundError for a place that has none.
    """
    found = []
    for place in places:
        folders = [
            folder
            for folder in (
                Path(place) / CHECKPOINTS,
                Path(place) / run_id / CHECKPOINTS,
                Path(place) / "outputs" / run_id / CHECKPOINTS,
            )
            if folder.is_dir()
        ]
        if not folders:
            raise FileNotFoundError(
                f"resume_from: {place} holds no {CHECKPOINTS}/ and no {run_id}/{CHECKPOINTS}/"
            )
        found += folders
    return found


def _begin_record(
    run: RunFolder,
    config: TrainConfig,
    program: Program,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    clock: Callable[[], float],
    on_progress: OnProgress | None,
) -> Record:
    """Opens metrics.jsonl and writes where this session begins, and the files beside it."""
    if checkpoint is not None and not checkpoint.path.is_relative_to(run.path):
        _import_history(run, checkpoint)
    record = Record(
        run,
        config,
        devices=list(program.placement.mesh.devices.flat),
        clock=clock,
        max_steps=last_step(config),
        on_progress=on_progress,
    )
    groups = describe_groups(program.abstract_state.params, program.optimizer)
    model = config.model_config
    record.begin(
        parameters=model.parameter_count,
        flops_per_token=model.flops_per_token(config.sequence_length),
        devices=program.placement.devices,
        optimizer_groups=groups,
    )
    run.write_json("config.json", {"model": model.to_dict(), "parameters": model.parameter_counts})
    run.write_json("training_args.json", {**asdict(config), "optimizer_groups": groups})
    for path, problem in sorted(store.rejected.items()):
        record.event("checkpoint_rejected", path=path.name, problem=problem)
        print(f"checkpoint {path.name} is passed over: {problem}", flush=True)
    if checkpoint is not None:
        record.event(
            "resume",
            step=checkpoint.step,
            elapsed_s=checkpoint.facts["elapsed_seconds"],
            checkpoint=checkpoint.path.name,
            commit_sha256=sha256_file(checkpoint.path / COMMIT),
            devices=program.placement.devices,
        )
        print(
            f"resuming at step {checkpoint.step:,}, {checkpoint.facts['tokens']:,} tokens, "
            f"sequence {checkpoint.step * config.batch_size:,} of data seed {config.data_seed}, "
            f"from {checkpoint.path}",
            flush=True,
        )
    elif any(row["kind"] in ("train", "eval") for row in record.rows):
        record.event("resume", step=0, elapsed_s=0.0, checkpoint=None)
        print("no valid checkpoint: training begins again at step 0", flush=True)
    return record


def _import_history(run: RunFolder, checkpoint: Checkpoint) -> None:
    """Copies the metrics of the session that wrote `checkpoint`, if this run has none and it is
    the same run, so that its record is whole."""
    theirs = checkpoint.path.parent.parent / METRICS
    ours = run.path / METRICS
    if ours.exists() or not theirs.is_file():
        return
    header = next(iter(read_rows(theirs)), {})
    if header.get("run_id") == run.run_id:
        shutil.copyfile(theirs, ours)


def _budget(
    config: TrainConfig,
    program: Program,
    checkpoint: Checkpoint | None,
    clock: Callable[[], float],
    started_at: float,
) -> Budget:
    budget = Budget(
        clock=clock,
        started_at=started_at,
        budget_seconds=config.budget_seconds,
        earlier_seconds=checkpoint.facts["elapsed_seconds"] if checkpoint else 0.0,
        counts_earlier=config.schedule_unit == "time",
    )
    budget.expect_checkpoint_bytes(state_bytes(program.abstract_state))
    return budget


def _result(loop: Loop, stop_reason: str, *, resumed: Checkpoint | None) -> TrainResult:
    evaluations = loop.record.evaluations()
    assert loop.saved is not None
    return TrainResult(
        stop_reason=stop_reason,
        step=loop.step,
        tokens=loop.step * loop.config.tokens_per_step,
        elapsed_seconds=loop.budget.elapsed(),
        resumed_from_step=resumed.step if resumed else None,
        skipped_steps=int(jax.device_get(loop.state.skipped)),
        predicted_final_step=loop.predicted_final_step,
        host_fraction=loop.host_seconds / loop.loop_seconds if loop.loop_seconds else None,
        first_evaluation=evaluations[0],
        last_evaluation=evaluations[-1],
        checkpoint=loop.saved.path,
    )
