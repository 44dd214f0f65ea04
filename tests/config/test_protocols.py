# SPDX-License-Identifier: Apache-2.0
"""Protects the protocols in params/ against what their cards state.

The numbers here are typed from the four cards, not computed from the files: tokens a step, steps,
warm-up and decay in tokens, what an evaluation reads, parameter counts.
"""

from pathlib import Path

import pytest

from atomic_lib.config import TrainConfig, load_config
from atomic_lib.data import parse_corpus
from atomic_lib.train.loop import End
from atomic_lib.train.schedule import schedule_from_config

ROOT = Path(__file__).resolve().parents[2]


def protocol(notebook: str, run: str) -> TrainConfig:
    config = load_config(notebook, {"run": run}, root=ROOT).config
    assert isinstance(config, TrainConfig)
    return config


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("notebook", "parameters"),
    [("train_baseline", 334_156_800), ("train_hybrid", 307_131_392)],
)
def test_atomic(notebook, parameters, seed):
    config = protocol(notebook, f"seed{seed}")
    assert config.model_config.parameter_count == parameters
    assert config.tokens_per_step == 65_536
    seeds = (config.init_seed, config.data_seed, config.dropout_seed)
    assert seeds == (seed, 42 + seed, 123 + seed)
    assert (config.optimizer, config.learning_rate) == ("muon_adamw", 3e-4)
    assert (config.schedule, config.schedule_unit) == ("cosine", "time")
    assert config.budget_seconds == 8 * 3600 + 54 * 60
    assert (config.warmup_steps, config.eval_every) == (100, 1500)
    assert config.document_separator is None
    assert config.accelerator == "tpu"


def test_berlm_hyb16():
    config = protocol("train", "berlm_hyb16")
    assert config.model_config.parameter_count == 365_281_644
    assert config.sequence_length == 16_384
    assert config.tokens_per_step == 1_572_864
    assert End.of(config, schedule_from_config(config)) == End(step=9_536, reason="max_tokens")
    assert config.max_tokens == 14_998_831_104
    assert config.document_separator is None  # "packed ... without document masking"
    assert (config.optimizer, config.learning_rate, config.init_seed) == ("adamw", 8e-4, 1)
    # Within half a step of what the card says in tokens.
    half = config.tokens_per_step / 2
    assert abs(config.warmup_steps * config.tokens_per_step - 1.5e9) <= half
    schedule = schedule_from_config(config)
    rate = lambda step: schedule.rate(step=step, elapsed_seconds=0.0)  # noqa: E731
    decay_begins = next(step for step in range(8_000, 9_536) if rate(step + 1) < 8e-4)
    assert abs(decay_begins * config.tokens_per_step - 13.5e9) <= config.tokens_per_step
    config.require_devices(8)


def test_gdn2_370m():
    config = protocol("train", "gdn2_370m")
    assert config.model_config.parameter_count == 275_516_544
    assert config.tokens_per_step == 4_194_304
    assert config.max_tokens == 100 * 10**9
    assert (config.optimizer, config.learning_rate) == ("adamw", 4e-4)
    assert (config.adam_b1, config.adam_b2, config.weight_decay) == (0.9, 0.95, 0.1)
    assert (config.clip_norm, config.schedule) == (1.0, "cosine")
    assert abs(config.warmup_steps * config.tokens_per_step - 1e9) <= config.tokens_per_step / 2
    assert config.eval_every == 960
    lengths = (config.sequence_length, *config.eval_lengths)
    assert lengths == (4_096, 8_192, 12_288, 16_384)
    windows = config.eval_batches * config.eval_rows
    tokens = [windows * 4_096 // length * length for length in lengths]
    assert sum(tokens) == 1_966_080  # "≈ 1.97 M tokens per validation pass"
    assert len(set(tokens)) == 1
    config.require_devices(8)
    # 8 sequences x 16 accumulations x 8 devices
    assert config.batch_size // (config.accumulate_steps * 8) == 8


@pytest.mark.parametrize("run", ["berlm_hyb16", "gdn2_370m"])
def test_the_corpus_is_fineweb_edu_in_a_vocabulary_of_32_000(run):
    config = protocol("train", run)
    corpus = parse_corpus(config.corpus)
    assert (corpus.kind, corpus.name) == ("huggingface", "HuggingFaceFW/fineweb-edu")
    assert corpus.options["separator"] == "</s>"
    wanted = (config.max_tokens or 0) / (1 - float(corpus.options["validation_fraction"]))
    assert int(corpus.options.get("max_tokens", wanted + 1)) > wanted
    assert config.model_config.vocab_size == 32_000
