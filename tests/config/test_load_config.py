# SPDX-License-Identifier: Apache-2.0
"""Protects: bad parameters are refused before anything runs, and good ones arrive with their type.

The oracle is the declared type of each field. Messages are matched, because a refusal that does not
name the parameter, its value and the nearest valid one is of no use to the person who reads it.
"""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from atomic_lib.config import NOTEBOOK_CONFIGS, TrainConfig, load_config
from atomic_lib.config.coerce import coerce

MINIMAL = {"run": "mine", "preset": "atomic-hybrid-smoke"}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "params" / "train_hybrid"
    folder.mkdir(parents=True)
    (folder / "smoke.yaml").write_text(
        "run: smoke\npreset: atomic-hybrid-smoke\nlearning_rate: 3e-4\nmax_steps: 60\n"
        "schedule_unit: steps\nbudget_seconds: null\n"
    )
    return tmp_path


def refused(root, message, error=ValueError, **values):
    with pytest.raises(error, match=message):
        load_config("train_hybrid", {**MINIMAL, **values}, root=root)


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        (float, "3e-4", 3e-4),
        (float, 1, 1.0),
        (int, "60", 60),
        (int, "1e3", 1000),
        (int, 60.0, 60),
        (bool, "false", False),
        (bool, "True", True),
        (int | None, "none", None),
        (int | None, "7", 7),
        (tuple[str, ...], ["a", "b"], ("a", "b")),
    ],
)
def test_loose_values_become_the_declared_type(kind, given, wanted):
    found = coerce("key", given, kind)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (float, "fast"),
        (float, True),
        (float, "nan"),
        (float, float("inf")),
        (int, 0.5),
        (int, "0.5"),
        (int, True),
        (int, "many"),
        (int, None),
        (bool, 1),
        (bool, "maybe"),
        (str, 3),
        (tuple[str, ...], "one"),
        (dict[str, int], [1]),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(kind, given):
    with pytest.raises(TypeError, match=r"^key: expected .*got"):
        coerce("key", given, kind)


@pytest.mark.parametrize("notebook", NOTEBOOK_CONFIGS)
def test_every_field_of_every_notebook_refuses_a_misspelling(notebook, root):
    for field in dataclasses.fields(NOTEBOOK_CONFIGS[notebook]):
        misspelt = field.name + "e"
        with pytest.raises(ValueError, match=f"{misspelt}: no such parameter.*'{field.name}'"):
            load_config(notebook, {"run": "mine", misspelt: 1}, root=root)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence_length": 0}, "sequence_length: 0"),
        ({"batch_size": -8}, "batch_size: -8"),
        ({"batch_size": 30, "accumulate_steps": 4}, "batch_size: 30 is not divisible by 4"),
        ({"batch_size": 12, "data_parallel": 8}, "batch_size: 12 is not divisible by 8"),
        ({"preset": "atomic-hybird"}, "atomic-hybird.*atomic-hybrid"),
        ({"schedule": "cosin"}, "schedule: 'cosin'.*'cosine'"),
        ({"schedule_unit": "steps"}, "max_steps: missing"),
        ({"loss_chunks": 3}, "loss_chunks: 3.*divisor of sequence_length 2048"),
        ({"eval_lengths": [4096, 5000]}, "eval_lengths: 5000.*multiple of sequence_length 2048"),
        ({"eval_lengths": [2048]}, "eval_lengths: 2048.*above it"),
        ({"document_separator": 50257}, r"document_separator: 50257.*\[0, 50257\)"),
        ({"dropout_rate": 1.0}, r"dropout_rate: 1.0.*\[0, 1\)"),
        ({"run": "../other"}, r"run: '\.\./other'"),
        ({"model": {"hidden_sise": 64}}, "hidden_sise.*hidden_size"),
    ],
)
def test_impossible_combinations_are_refused(root, values, message):
    refused(root, message, **values)


@pytest.mark.parametrize(
    ("values", "devices", "message"),
    [
        ({"batch_size": 12}, 8, "batch_size: 12.*multiple of 8"),
        ({"eval_batch_size": 12}, 8, "eval_batch_size: 12.*multiple of 8 devices"),
        ({"fsdp": 3, "batch_size": 24}, 8, "fsdp: 3.*divisor of 8"),
        ({"data_parallel": 16}, 8, "needs 16 devices; this machine has 8"),
    ],
)
def test_a_batch_that_does_not_fit_the_devices_is_refused(values, devices, message):
    config = TrainConfig(**MINIMAL, **values)
    with pytest.raises(ValueError, match=message):
        config.require_devices(devices)


def test_a_file_is_read_overridden_and_each_origin_recorded(root):
    loaded = load_config(
        "train_hybrid", {"run": "smoke", "max_steps": "8", "batch_size": None}, root=root
    )
    assert loaded.run_id == "train_hybrid-smoke"
    assert loaded.config.learning_rate == 3e-4
    assert loaded.config.budget_seconds is None
    assert loaded.config.max_steps == 8
    origins = {
        name: loaded.origins[name] for name in ("learning_rate", "max_steps", "batch_size", "run")
    }
    assert origins == {
        "learning_rate": "file", "max_steps": "override", "batch_size": "default", "run": "file",
    }  # fmt: skip


def test_an_unknown_run_lists_the_runs_that_exist(root):
    with pytest.raises(
        FileNotFoundError, match=r"smokey\.yaml does not exist; train_hybrid has smoke"
    ):
        load_config("train_hybrid", {"run": "smokey"}, root=root)


@pytest.mark.parametrize("text", ["- a list", "a: [1", "just text"])
def test_a_file_that_is_no_mapping_is_refused_with_its_path(root, text):
    (root / "params" / "train_hybrid" / "broken.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"broken\.yaml"):
        load_config("train_hybrid", {"run": "broken"}, root=root)


def test_the_config_needs_no_jax():
    code = "import sys, atomic_lib.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_shipped_parameter_file_is_valid(request):
    root = request.config.rootpath
    files = sorted((root / "params").glob("*/*.yaml"))
    assert len(files) >= len(NOTEBOOK_CONFIGS)
    for path in files:
        values = yaml.safe_load(path.read_text())
        assert values["run"] == path.stem, path
        loaded = load_config(path.parent.name, values, root=root)
        assert "override" not in loaded.origins.values(), path
