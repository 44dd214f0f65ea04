# SPDX-License-Identifier: Apache-2.0
"""Protects the ahead-of-time report in runs: when a preflight compiles, skips or refuses, and that
a training run's SUCCESS.json puts measured beside predicted for its own program and devices alone.

Oracles: a report written by hand with figures of its own, and rows of step times whose median is
known. Exact. Nothing compiles: what a real report holds is protected in tests/aot.
"""

import json

import jax
import pytest
from tiny_runs import make_config, open_run

from atomic_lib.aot import AotUnavailableError
from atomic_lib.aot import compile as aot_compile
from atomic_lib.aot.identity import program_identity
from atomic_lib.evidence import verify
from atomic_lib.preflight import (
    compile_ahead_of_time,
    predicted_and_measured,
    prediction_rows,
)
from atomic_lib.preflight.ahead import AHEAD_OF_TIME

STEP_TIMES = (None, 210.0, 190.0, 400.0)  # the first step compiles


def write_report(outputs, config, **changes):
    """A report such as `CompileReport.to_dict` makes, as far as it is read."""
    report = {
        "program": program_identity(config),
        "device_kind": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "basis": "compiled for a test",
        "predicted_step_ms": 180.0,
        "predicted_step_ms_at_bandwidth": 150.0,
        "predicted_hbm_bytes": 8 * 2**30,
        **changes,
    }
    folder = outputs / "preflight-seed1"
    folder.mkdir(exist_ok=True)
    (folder / AHEAD_OF_TIME).write_text(json.dumps(report))


@pytest.fixture
def run(tmp_path):
    config = make_config()
    run = open_run(tmp_path / "train_hybrid-tiny", config)
    run.metrics.start(run_id=run.run_id, tokens_per_step=config.tokens_per_step)
    for step, milliseconds in enumerate(STEP_TIMES, start=1):
        run.metrics.append(
            "train", step=step, tokens=step * config.tokens_per_step, loss=1.0, lr=0.1,
            grad_norm=1.0, finite=True, elapsed_s=float(step), step_ms=milliseconds,
        )  # fmt: skip
    return run


def test_success_has_measured_beside_predicted(run, tmp_path):
    # Another seed of the same program may use the report; its learning rate is an argument.
    write_report(tmp_path, make_config(init_seed=5, learning_rate=0.5, max_steps=99))
    prediction = predicted_and_measured(run, make_config())
    rows = {row["quantity"]: row for row in prediction_rows(prediction)}
    assert rows["step ms"] == {"quantity": "step ms", "predicted": 180.0, "measured": 210.0}
    run.succeed(stop_reason="completed", **prediction)
    kept = json.loads((run.path / "SUCCESS.json").read_text())["results"]["prediction"]
    assert kept["report"] == "preflight-seed1/ahead-of-time.json"
    assert kept["step_ms"] == {
        "predicted": 180.0, "predicted_at_bandwidth": 150.0, "measured": 210.0,
    }  # fmt: skip
    # A CPU does not say what it holds.
    assert kept["hbm_bytes"] == {"predicted": 8 * 2**30, "measured": None}
    assert verify(run.path) == []


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"batch_size": 8}},
        {"config": {"model": {"vocab_size": 48, "hidden_size": 16, "norm_family": "R"}}},
        {"device_kind": "TPU v5 lite"},
        {"devices": 8},
    ],
    ids=["batch", "architecture", "device-kind", "device-count"],
)
def test_a_report_of_another_program_or_device_is_not_used(run, tmp_path, other):
    write_report(tmp_path, make_config(**other.pop("config", {})), **other)
    assert predicted_and_measured(run, make_config()) == {}
    assert prediction_rows({}) == []


def test_a_preflight_that_is_not_asked_or_has_no_compiler_says_so(run, monkeypatch):
    (row,) = compile_ahead_of_time(run, make_config(), topology=None)
    assert (row["value"], row["basis"][:13]) == ("skipped", "not asked for")

    def refuse():
        raise AotUnavailableError("no libtpu here")

    monkeypatch.setattr(aot_compile, "require_aot_compiler", refuse)
    (row,) = compile_ahead_of_time(run, make_config(), topology="v5e-1")
    assert (row["value"], row["basis"]) == ("skipped", "no libtpu here")
    assert not (run.path / AHEAD_OF_TIME).exists()


def test_a_run_that_cannot_fit_fails_the_preflight_with_what_helps(run):
    config = make_config(preset="atomic-hybrid@3b", model={}, batch_size=8)
    with pytest.raises(RuntimeError, match=r"v5e-8 does not fit.* over.*fsdp 8 should save"):
        compile_ahead_of_time(run, config, topology="v5e-8")
    assert json.loads((run.path / AHEAD_OF_TIME).read_text())["fits"] is False
    assert "does not fit" in json.loads((run.path / "FAILED.json").read_text())["reason"]
