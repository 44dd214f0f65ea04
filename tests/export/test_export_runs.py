# SPDX-License-Identifier: Apache-2.0
"""From a finished run's checkpoint to an export, and back to a model.

Oracle: the parameters that the fixture put into the checkpoint, and the logits that they give in a
model built from them directly. Exact: the same arrays in the same program.
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atomic_lib.config import ExportConfig
from atomic_lib.evidence import RunFolder, verify
from atomic_lib.export import export, load_export, read_export
from atomic_lib.model import Execution, bind_parameters, model_graph

CONFIG = ExportConfig(run="tiny", sources=("train_hybrid-tiny",))


def open_run(outputs):
    return RunFolder.open(
        outputs / "export-tiny", notebook="export", parameters={}, origins={}, root=outputs
    )


def test_the_checkpoint_of_a_run_becomes_a_verified_export(outputs, parameters, config):
    run = open_run(outputs)
    (row,) = export(run, CONFIG)
    assert row["run"] == "train_hybrid-tiny"
    assert row["step"] == 3
    assert row["parameters"] == config.parameter_count
    exported = read_export(run.path / "train_hybrid-tiny")
    assert exported.config == config
    for name, value in parameters.items():
        np.testing.assert_array_equal(exported.tensors[name], np.asarray(value), err_msg=name)
    source = json.loads((outputs / "train_hybrid-tiny" / "SUCCESS.json").read_text())
    assert exported.facts["source"]["checkpoint"] == source["checkpoint"]
    assert exported.facts["source"]["success_digest"] == source["digest"]
    assert exported.facts["source"]["data"] == {"train": ["1a"], "validation": ["2b"]}
    assert exported.facts["source"]["training"]["preset"] == "atomic-hybrid-smoke"
    assert (exported.folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (exported.folder / "metrics.jsonl").read_bytes() == (
        outputs / "train_hybrid-tiny" / "metrics.jsonl"
    ).read_bytes()
    run.succeed("completed")
    assert verify(run.path) == []


def test_the_loaded_model_computes_what_the_trained_one_does(outputs, parameters, config):
    run = open_run(outputs)
    export(run, CONFIG)
    loaded_config, model = load_export(run.path / "train_hybrid-tiny")
    assert loaded_config == config
    tokens = jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    trained = bind_parameters(model_graph(config, Execution(compute_dtype="float32")), parameters)
    logits = nnx.jit(lambda model: model.logits(model(tokens)[0]))
    got, want = logits(model), logits(trained)
    assert got.shape == (2, 10, 80)
    assert bool(jnp.isfinite(got).all())
    np.testing.assert_array_equal(got, want)


def test_a_missing_source_is_refused_before_any_is_exported(outputs):
    run = open_run(outputs)
    config = ExportConfig(run="tiny", sources=("train_hybrid-tiny", "train_hybrid-typo"))
    with pytest.raises(FileNotFoundError, match="'train_hybrid-typo' is not in"):
        export(run, config)
    assert not (run.path / "train_hybrid-tiny").exists()


def test_a_run_without_its_checkpoint_says_so(outputs):
    shutil.rmtree(outputs / "train_hybrid-tiny" / "checkpoints")
    with pytest.raises(
        FileNotFoundError, match=r"without its checkpoint checkpoints/step_00000003"
    ):
        export(open_run(outputs), CONFIG)


def test_a_run_that_trained_nothing_is_refused(outputs):
    other = RunFolder.open(
        outputs / "compare-x", notebook="compare", parameters={}, origins={}, root=outputs
    )
    other.succeed("completed")
    with pytest.raises(ValueError, match="'compare-x' wrote no checkpoint"):
        export(open_run(outputs), ExportConfig(run="tiny", sources=("compare-x",)))


def test_a_damaged_checkpoint_is_refused(outputs):
    checkpoint = outputs / "train_hybrid-tiny" / "checkpoints" / "step_00000003"
    data = next(path for path in (checkpoint / "state").rglob("*") if path.stat().st_size > 4000)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="'train_hybrid-tiny' is not verified"):
        export(open_run(outputs), CONFIG)
