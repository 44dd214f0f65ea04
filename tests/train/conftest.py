# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of training: the model of `tiny`, and runs of it (see `tiny_runs`)."""

import shutil

import jax
import pytest
import tiny
from tiny_runs import (
    COMPILED_IN,
    EVERY_STEP,
    Faulty,
    PulledPlug,
    make_config,
    open_run,
    write_tokens,
)

from atomic_lib.data import open_token_folder
from atomic_lib.train import program, session, train


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiles each program once: these tests start many sessions of the same few runs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax_cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module")
def tiny_model():
    """Puts the model of `tiny` in the place of the language model, for one test file."""
    programs = {}

    def build_once(config):
        key = (program.model_forward, *(getattr(config, name) for name in COMPILED_IN))
        if key not in programs:
            programs[key] = program.build_program(config)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "build_program", build_once)
        patch.setattr(program, "model_forward", lambda *arguments: tiny.tiny_forward)
        patch.setattr(program, "init_parameters", lambda config, seed: tiny.tiny_params(int(seed)))
        yield


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def dataset(token_folder):
    return open_token_folder(token_folder, vocab_size=tiny.VOCABULARY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dataset, tiny_model):
    """The folder of a run that nothing has happened to; not to be written."""
    config = make_config()
    run = open_run(tmp_path_factory.mktemp("whole") / "run", config)
    train(run, config, dataset)
    return run.path


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory, dataset, tiny_model):
    """The folder of a run that died at step 7, with checkpoints of steps 5 and 6."""
    config = make_config(**EVERY_STEP)
    run = open_run(tmp_path_factory.mktemp("dead") / "run", config)
    with pytest.raises(PulledPlug):
        train(run, config, Faulty(dataset, 7))
    return run.path


@pytest.fixture
def broken(tmp_path, dead_run):
    """A copy of `dead_run`, to be damaged."""
    return shutil.copytree(dead_run, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
