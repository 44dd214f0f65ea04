# SPDX-License-Identifier: Apache-2.0
"""`train`: begins or resumes a run, trains to its end, and says how it ended."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.evidence import RunFolder
from atomic_lib.evidence.verify import WATCH, sha256_file
from atomic_lib.hosts.processes import together
from atomic_lib.train.budget import Budget
from atomic_lib.train.checkpoint import COMMIT, Checkpoint, CheckpointStore, state_bytes
from atomic_lib.train.decision import require_same_start
from atomic_lib.train.earlier import attached_checkpoints, import_history, locate
from atomic_lib.train.evaluation import Validation
from atomic_lib.train.heartbeat import Heartbeat
from atomic_lib.train.interrupts import StopSignals
from atomic_lib.train.loop import End, Loop
from atomic_lib.train.optimizer import describe_groups
from atomic_lib.train.profiling import ProfileWindow
from atomic_lib.train.program import Program, build_program, resume_config
from atomic_lib.train.record import OnProgress, Record
from atomic_lib.train.replay import REPLAY, Replay
from atomic_lib.train.result import TrainResult
from atomic_lib.train.schedule import schedule_from_config
from atomic_lib.train.trackers import Trackers


def train(
    run: RunFolder,
    config: TrainConfig,
    dataset: TokenDataset,
    *,
    clock: Callable[[], float] = time.monotonic,
    started_at: float | None = None,
    on_progress: OnProgress | None = None,
) -> TrainResult:
    """Trains `config` in the run folder `run` until its time, steps or tokens are used up.

    Resumes from the newest valid checkpoint in the run folder, in `config.resume_from` or in what
    a Kaggle session has attached; those are only read. `clock` returns seconds and `started_at` is
    its value when the session's first cell ran (now, if None). `on_progress` gets the rows so far
    every few seconds. Training starts with an evaluation of step 0 and ends with one of the last
    step. With `config.replay` the recorded learning rates are used again to the record's end,
    however long that takes, and replay.json says whether everything else came out the same.

    Raises ConfigMismatchError for a checkpoint of another configuration, TrainingInterrupted after
    SIGTERM or SIGINT, NonFiniteError after `config.max_skipped_in_a_row` bad steps; FAILED.json is
    written for each.
    """
    started_at = clock() if started_at is None else started_at
    with run.recording(), StopSignals() as signals:
        run.progress("preparing", 0, 0, "building the model")
        replay = Replay.of(locate(run, "replay", config.replay)) if config.replay else None
        schedule = replay.schedule if replay else schedule_from_config(config)
        end = End.of(config, schedule)
        program = build_program(config)
        store = CheckpointStore(
            folder=run.checkpoints,
            config=resume_config(config, dataset.manifest),
            keep=config.keep_checkpoints,
            others=attached_checkpoints(run, config.resume_from),
        )
        together(store.drop_partial, "clear what is half written", first_only=True)
        # The recorded run's last checkpoint would leave a replay nothing to repeat.
        checkpoint = store.newest_valid(others_before=end.step if replay and end else None)
        require_same_start(checkpoint)
        trackers = Trackers(config.trackers, run=run.path, config=asdict(config))
        record = Record(
            run,
            config,
            devices=list(program.placement.mesh.devices.flat),
            clock=clock,
            heartbeat=Heartbeat(run, target=end.step if end else None, clock=clock),
            trackers=trackers,
            on_progress=on_progress,
        )
        _begin_record(record, config, program, store, checkpoint)
        budget = _budget(config, program, checkpoint, clock, started_at)
        loop = Loop(
            config=config,
            dataset=dataset,
            program=program,
            validation=Validation.of(config, dataset, program.placement, program.evaluate),
            schedule=schedule,
            end=end,
            store=store,
            budget=budget,
            record=record,
            state=checkpoint.restore(program.abstract_state) if checkpoint else program.start(),
            step=checkpoint.step if checkpoint else 0,
            saved=checkpoint if checkpoint and checkpoint.path.parent == run.checkpoints else None,
            signals=signals,
            profile=ProfileWindow(config.profile_steps, run.path / WATCH / "profile"),
        )
        try:
            stop_reason = loop.run()
        finally:
            trackers.close()
        record.note_tracker_failures()
        return _result(loop, stop_reason, resumed=checkpoint, audit=_audit(record, replay))


def _audit(record: Record, replay: Replay | None) -> dict[str, Any] | None:
    """Compares a replay with what it repeats and writes replay.json."""
    if replay is None:
        return None
    audit = replay.compare(record.rows)
    record.run.write_json(REPLAY, audit)
    record.event("replayed", **{name: audit[name] for name in ("source", "rows", "bit_exact")})
    verdict = "bit for bit" if audit["bit_exact"] else f"with {audit['differences']} differences"
    print(f"replayed {audit['rows']:,} rows of {audit['source'] or replay.source} {verdict}")
    return audit


def _begin_record(
    record: Record,
    config: TrainConfig,
    program: Program,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
) -> None:
    """Opens metrics.jsonl and writes where this session begins, and the files beside it."""
    run = record.run
    if checkpoint is not None and not checkpoint.path.is_relative_to(run.path):
        import_history(run, checkpoint)
    groups = describe_groups(program.abstract_state.params, program.optimizer)
    model = config.model_config
    record.begin(
        parameters=model.parameter_count,
        flops_per_token=model.flops_per_token(config.sequence_length),
        devices=program.placement.devices,
        optimizer_groups=groups,
    )
    for group in groups:
        print(
            f"{group['update']} with weight decay {group['weight_decay']:g}: {group['what']}, "
            f"{group['tensors']:,} tensors, {group['parameters']:,} parameters",
            flush=True,
        )
    run.write_json("config.json", {"model": model.to_dict(), "parameters": model.parameter_counts})
    run.write_json("training_args.json", {**asdict(config), "optimizer_groups": groups})
    for path, problem in sorted(store.rejected.items()):
        record.event("checkpoint_rejected", path=path.name, problem=problem)
        print(f"checkpoint {path.name} is passed over: {problem}", flush=True)
    if checkpoint is not None:
        recorded = max((row["step"] for row in record.rows if row["kind"] == "train"), default=0)
        if recorded < checkpoint.step:  # the log was lost or put back, the checkpoint was not
            record.event("rows_missing", first=recorded + 1, last=checkpoint.step)
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
        # A replay has its own end, and this machine may be slower than the recorded one.
        budget_seconds=None if config.replay else config.budget_seconds,
        eval_every=config.eval_every,
        checkpoint_every_seconds=config.checkpoint_seconds,
        earlier_seconds=checkpoint.facts["elapsed_seconds"] if checkpoint else 0.0,
        counts_earlier=config.schedule_unit == "time",
    )
    budget.expect_checkpoint_bytes(state_bytes(program.abstract_state))
    return budget


def _result(
    loop: Loop,
    stop_reason: str,
    *,
    resumed: Checkpoint | None,
    audit: dict[str, Any] | None,
) -> TrainResult:
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
        device_wait_fraction=(
            loop.device_wait_seconds / loop.loop_seconds if loop.loop_seconds else None
        ),
        first_evaluation=evaluations[0],
        last_evaluation=evaluations[-1],
        checkpoint=loop.saved.path,
        replay=audit,
    )
