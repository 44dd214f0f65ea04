# SPDX-License-Identifier: Apache-2.0
"""Protects evaluation at several lengths: the same text at each, every target counted once.

Oracle: the model of `tiny` looks at one token at a time, so its loss on a text is the same however
the text is cut into sequences; float32 sums in another order (1e-6) are all that may differ.
"""

import numpy as np
import pytest
import tiny
from tiny_runs import make_config

from atomic_lib.train.evaluation import Validation
from atomic_lib.train.program import build_program

SETTINGS = {"dropout_rate": 0.0, "loss_chunks": 2, "eval_batch_size": 5, "eval_batches": 2}
LENGTHS = (24, 60)  # 120 tokens: 5 windows two at a time, one of the six rows is padding; 2 windows


@pytest.fixture(scope="module")
def row(dataset, tiny_model):
    config = make_config(eval_lengths=LENGTHS, **SETTINGS)
    program = build_program(config)
    validation = Validation.of(config, dataset, program.placement, program.evaluate)
    told = []
    params = {name: value for name, value in tiny.tiny_params(3).items()}
    row = validation.run(params, lambda done, total: told.append((done, total)))
    assert told == [(done, 2 + 3 + 2) for done in range(8)]
    return row


def test_every_length_gives_the_loss_of_the_same_text(row):
    assert row["target_tokens"] == 2 * 5 * tiny.LENGTH
    assert row["batches"] == 2
    assert [one["length"] for one in row["by_length"]] == list(LENGTHS)
    for one in row["by_length"]:
        assert one["target_tokens"] == row["target_tokens"]
        assert one["windows"] * one["length"] == row["target_tokens"]
        np.testing.assert_allclose(one["ce"], row["ce"], rtol=1e-6)


def test_without_lengths_the_row_has_no_such_field(dataset, tiny_model):
    config = make_config(**SETTINGS)
    program = build_program(config)
    found = Validation.of(config, dataset, program.placement, program.evaluate)
    assert found.longer == ()
    assert "by_length" not in found.run(dict(tiny.tiny_params(3)))


def test_a_length_that_the_text_does_not_fill_is_refused(dataset, tiny_model):
    config = make_config(**{**SETTINGS, "eval_batches": 1}, eval_lengths=(120,))
    program = build_program(config)
    with pytest.raises(ValueError, match=r"eval_lengths: 120 needs at least one window"):
        Validation.of(config, dataset, program.placement, program.evaluate)
