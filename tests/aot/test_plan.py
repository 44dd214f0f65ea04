# SPDX-License-Identifier: Apache-2.0
"""Protects what is refused or answered before anything compiles: slices, state that cannot fit,
disk, session arithmetic, and the refusals of `python -m atomic_lib.preflight`.

Oracles: published parameter counts times bytes (written out here, not taken from the library), and
the trainer's budget rule worked out by hand. Exact; only divisions get a relative 1e-9.
"""

from importlib import metadata

import pytest
import yaml

from atomic_lib.aot import AotUnavailableError, Target, compile_report, target
from atomic_lib.aot.memory import ChipMemory, memory_problem, state_floor_bytes
from atomic_lib.aot.session import plan_disk, plan_session
from atomic_lib.config import TrainConfig
from atomic_lib.preflight.__main__ import REFUSED, main

HYBRID = 307_131_392
HYBRID_MUON = 255_524_864
GIB = 2**30


def hybrid(**changes) -> TrainConfig:
    return TrainConfig(**{"run": "t", "preset": "atomic-hybrid", **changes})


@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts"),
    [
        ("v5e-1", "v5e:1x1", 1, 1),
        ("v5e-8", "v5e:2x4", 8, 1),
        ("v5e:2x4", "v5e:2x4", 8, 1),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v5e-16", "v5e:4x4", 16, 4),
        ("v5e-256", "v5e:16x16", 256, 64),
    ],
)
def test_a_slice_has_its_chips_and_hosts(name, topology, chips, hosts):
    found = Target.named(name)
    assert (found.topology, found.chips, found.hosts) == (topology, chips, hosts)


@pytest.mark.parametrize("name", ["v4-8", "v5e-7", "v5e", "v5e:3x3", "8"])
def test_an_unknown_slice_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=rf"topology: '{name}' is not known.*v5e.*v6e"):
        Target.named(name)


def test_the_state_floor_is_parameters_moments_and_gradients():
    # Muon keeps one moment, AdamW two.
    wanted = 4 * (HYBRID + HYBRID + HYBRID_MUON + 2 * (HYBRID - HYBRID_MUON))
    assert state_floor_bytes(hybrid()) == wanted
    assert state_floor_bytes(hybrid(optimizer="adamw")) == 4 * 4 * HYBRID
    assert state_floor_bytes(hybrid(optimizer="adamw", fsdp=8)) == 4 * 4 * HYBRID // 8


def test_a_state_that_cannot_fit_is_reported_at_once_with_the_knob():
    config = hybrid(preset="atomic-hybrid@3b")
    report = compile_report(config, topology="v5e-8")
    assert not report.fits
    assert report.train is None
    needed = state_floor_bytes(config) / GIB
    assert f"{needed:.2f} GiB where 15.75 are allowed, {needed - 15.75:.2f} over" in report.verdict
    assert "fsdp 8 should save about" in report.verdict
    assert report.rows()[-1]["value"] == report.verdict


def test_memory_advice_names_the_smallest_slicing_that_saves_enough():
    # 20 GiB, of which 17 GiB are temporaries and 1.14 GiB of those are gradients: two slices save
    # (17 - 1.14) / 2 - 1.14 = 6.8 GiB, and 4.25 are needed.
    memory = ChipMemory(
        parameters=GIB, optimizer=2 * GIB, batch_and_padding=0, outputs=0,
        temporaries=17 * GIB, code=0,
    )  # fmt: skip
    problem = memory_problem(hybrid(), Target.named("v5e-8"), memory.total, memory)
    assert (problem.needed, problem.allowed) == (20, 15.75)
    assert problem.advice[0].startswith("accumulate_steps 2 should save about 6.8 GiB")


def test_a_program_within_the_limit_has_no_problem():
    assert memory_problem(hybrid(), Target.named("v5e-8"), 15 * GIB, None) is None


def test_the_disk_holds_kept_checkpoints_one_in_flight_and_an_export():
    state = 4 * (HYBRID + HYBRID_MUON + 2 * (HYBRID - HYBRID_MUON))
    disk = plan_disk(hybrid(keep_checkpoints=2), state)
    assert disk.total_bytes == 3 * state + 4 * HYBRID
    assert disk.problem() is None
    problem = plan_disk(hybrid(keep_checkpoints=20), state).problem()
    # (20 GB - 1.23 GB) / 2.66 GB = 7 checkpoints, one of them being written.
    assert "keep_checkpoints 6 is needed" in str(problem)


def test_the_session_follows_the_trainers_budget():
    config = hybrid(budget_seconds=10_000.0, eval_every=100, eval_batches=10)
    plan = plan_session(
        config, step_seconds=0.2, evaluation_step_seconds=0.05, compile_seconds=300.0,
        state_bytes=10_000_000_000,
    )  # fmt: skip
    # An evaluation takes 0.5 s, a checkpoint 100 s (10 GB at 100 MB/s), finishing 20 s.
    left = 10_000 - 1.5 * (0.5 + 100 + 20) - 300
    step = (0.2 + 0.5 / 100) / (1 - 100 / 900)
    assert plan.final_step == int(left / step)
    assert plan.tokens == plan.final_step * 32 * 2048
    assert plan.evaluations == plan.final_step // 100


def test_a_token_limit_ends_the_run_first():
    config = hybrid(max_tokens=1_000_000)
    plan = plan_session(
        config, step_seconds=0.1, evaluation_step_seconds=0.1, compile_seconds=1.0, state_bytes=1
    )
    assert plan.final_step == -(-1_000_000 // 65_536)


def parameter_file(folder, notebook="train_hybrid", **values):
    path = folder / "params" / notebook / "case.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"run": "case", **values}))
    return path


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"preset": "atomic-hybird"}, "atomic-hybrid"),
        ({"preset": "atomic-hybrid", "batch_size": 30}, "batch_size: 30"),
        ({"preset": "atomic-hybrid", "fsdp": 3, "batch_size": 24}, "fsdp: 3"),
        ({"preset": "atomic-hybrid", "sequence_lenght": 1}, "sequence_length"),
    ],
    ids=["unknown-preset", "batch-does-not-divide", "mesh-does-not-divide", "unknown-name"],
)
def test_bad_parameters_are_refused_before_a_compile(tmp_path, capsys, monkeypatch, values, words):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main([str(parameter_file(tmp_path, **values))]) == REFUSED
    printed = capsys.readouterr().err
    assert printed.startswith("refused: ")
    assert words in printed


def test_a_file_that_trains_nothing_is_refused(tmp_path, capsys):
    assert main([str(parameter_file(tmp_path, notebook="export", sources=["x"]))]) == REFUSED
    assert "trains nothing" in capsys.readouterr().err.replace("\n", " ")


def test_a_libtpu_of_another_jax_is_refused_with_the_command(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(
        target.metadata, "version", lambda name: "0.0.17" if name == "libtpu" else real(name)
    )
    monkeypatch.setattr(target, "require_compiler", lambda: None)
    jax_version = real("jax")
    with pytest.raises(
        AotUnavailableError, match=rf"libtpu 0\.0\.17 does not belong to jax {jax_version}"
    ):
        compile_report(hybrid())
