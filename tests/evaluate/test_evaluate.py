# SPDX-License-Identifier: Apache-2.0
"""Bits per byte of exported weights: the right sums, and the trainer's own last result again.

Oracle: float64 log-softmax in numpy over the logits of the whole window (the evaluation never holds
logits of all tokens, and sums in float32), and each target's bytes by decoding it. Tolerance: the
logits are float32 with |z| < 4, so a token's loss carries a few 1e-7; means are allowed 2e-6.
"""

import json
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atomic_lib.config import EvaluateConfig, ExportConfig, TrainConfig
from atomic_lib.data import gpt2_tokenizer, open_dataset
from atomic_lib.evaluate import evaluate, evaluate_parameters, position_rows
from atomic_lib.evidence import RunFolder
from atomic_lib.export import export, load_export
from atomic_lib.model import init_parameters
from atomic_lib.train.checkpoint import CheckpointStore
from atomic_lib.train.step import TrainState

MEAN_LOSS_TOLERANCE = 2e-6
SEPARATOR = 50_256
T, BATCH, BATCHES = 16, 2, 3
TRAINING = TrainConfig(
    run="tiny",
    preset="atomic-hybrid-smoke",
    # One mixer of one block: a compile here costs more than all the arithmetic.
    model={"hidden_size": 16, "ffn_size": 32, "num_blocks": 1, "block": ["mla"], "routing": "none"},
    corpus="texts.txt?validation_fraction=0.4",
    compute_dtype="float32",
    sequence_length=T,
    batch_size=BATCH,
    eval_batches=BATCHES,
)
CONFIG = EvaluateConfig(run="tiny", source="export-tiny", batch_size=BATCH)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a corpus of short documents, accents included."""
    folder = tmp_path_factory.mktemp("root")
    words = ["alpha", "beta", "naïve", "東京", "river", "1871", "the"]
    generator = random.Random(5)
    texts = [" ".join(generator.choices(words, k=9)) + f" {i}.\n" for i in range(40)]
    (folder / "texts.txt").write_text("<|endoftext|>\n".join(texts))
    return folder


@pytest.fixture(scope="module")
def dataset(root):
    return open_dataset(TRAINING.corpus, vocab_size=50_257, root=root)


@pytest.fixture(scope="module")
def parameters():
    values = init_parameters(TRAINING.model_config, 1)
    # A larger table spreads the losses (all near ln V at the start), so that mistakes show.
    return {name: v * 20 if name == "embedding/table" else v for name, v in values.items()}


def open_run(outputs, notebook, run="tiny", parameters=None):
    parameters = parameters or {}
    return RunFolder.open(
        outputs / f"{notebook}-{run}", notebook=notebook, parameters=parameters,
        origins=dict.fromkeys(parameters, "file"), root=outputs,
    )  # fmt: skip


def write_training_run(outputs, parameters, dataset, *, ce, windows=BATCH * BATCHES):
    """The finished run train_hybrid-tiny with these parameters and this last evaluation."""
    values = {name: getattr(TRAINING, name) for name in TRAINING.__dataclass_fields__}
    run = open_run(outputs, "train_hybrid", parameters=values)
    run.metrics.start(run_id=run.run_id, tokens_per_step=BATCH * T)
    position = {"step": 3, "tokens": 3 * BATCH * T, "elapsed_s": 1.0}
    run.metrics.append("train", **position, loss=4.0, lr=1e-3, grad_norm=1.0, finite=True)
    run.metrics.append(
        "eval", **position, ce=ce, bpb_est=ce / np.log(2) / 4.2, target_tokens=windows * T,
        batches=BATCHES,
    )  # fmt: skip
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(
        step=zero,
        params=parameters,
        optimizer={},
        skipped=zero,
        skipped_in_a_row=zero,
        clipped=zero,
    )
    hashes = {
        split: [facts["hash"] for facts in dataset.manifest[split]]
        for split in ("train", "validation")
    }
    store = CheckpointStore(folder=run.path / "checkpoints", config={"data": hashes})
    store.save(state, step=3, facts={})
    run.succeed("max_steps")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, parameters, dataset):
    """outputs/ with an export whose trainer logged a cross-entropy that is found to be its own."""
    outputs = tmp_path_factory.mktemp("exported")
    found = evaluate_parameters(parameters, TRAINING, dataset, batch_size=BATCH, batches=BATCHES)
    write_training_run(outputs, parameters, dataset, ce=found["ce"])
    run = open_run(outputs, "export")
    export(run, ExportConfig(run="tiny", sources=("train_hybrid-tiny",)))
    run.succeed("completed")
    return outputs


@pytest.fixture(scope="module")
def expected(exported, dataset):
    """Loss [windows, T] in float64 of the exported model, and each target's bytes."""
    _, model = load_export(exported / "export-tiny" / "train_hybrid-tiny")
    windows = dataset.validation.read_windows(np.arange(BATCH * BATCHES), T)
    logits_of = nnx.jit(lambda model, tokens: model.logits(model(tokens)[0]))
    logits = np.asarray(logits_of(model, windows[:, :-1]), np.float64)
    targets = windows[:, 1:]
    top = logits.max(-1, keepdims=True)
    log_total = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    losses = log_total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    # "latin-1" of the byte-level alphabet has one character a byte.
    names = {i: text for text, i in gpt2_tokenizer().vocabulary.items()}
    lengths = np.vectorize(lambda i: 0 if i == SEPARATOR else len(names[i]))(targets)
    return losses, lengths


def test_sums_equal_a_float64_log_softmax(parameters, dataset, expected):
    losses, lengths = expected
    assert 0 < np.count_nonzero(lengths == 0) < lengths.size, "separators must be among the targets"
    assert losses.std() > 0.5, "losses must differ, or a wrong target would not show"
    found = evaluate_parameters(parameters, TRAINING, dataset, batch_size=BATCH, batches=BATCHES)
    assert found["target_tokens"] == losses.size
    assert found["batches"] == BATCHES
    assert found["bytes"] == lengths.sum()
    assert found["ce"] == pytest.approx(losses.mean(), rel=MEAN_LOSS_TOLERANCE)
    assert found["bpb_est"] == pytest.approx(
        losses.mean() / np.log(2) / 4.2, rel=MEAN_LOSS_TOLERANCE
    )
    exact = losses[lengths > 0].sum() / np.log(2) / lengths.sum()
    assert found["bpb_exact"] == pytest.approx(exact, rel=MEAN_LOSS_TOLERANCE)


@pytest.mark.parametrize("batch_size", [3])
def test_the_batch_size_does_not_change_the_result(parameters, dataset, expected, batch_size):
    windows = BATCH * BATCHES
    found = evaluate_parameters(
        parameters, TRAINING, dataset, batch_size=batch_size, batches=windows // batch_size
    )
    assert found["ce"] == pytest.approx(expected[0].mean(), rel=MEAN_LOSS_TOLERANCE)
    assert found["bytes"] == expected[1].sum()


def test_losses_by_position(parameters, dataset, expected):
    losses = evaluate_parameters(parameters, TRAINING, dataset, batch_size=BATCH, batches=BATCHES)[
        "position_nats"
    ]
    assert losses.shape == (T,)
    np.testing.assert_allclose(losses, expected[0].mean(axis=0), rtol=MEAN_LOSS_TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_position_rows_cover_each_position_once(length):
    losses = np.arange(length, dtype=np.float64)
    rows = position_rows(losses)
    spans = [[int(edge) for edge in row["positions"].split("–")] for row in rows]
    covered = [i for span in spans for i in range(span[0], span[-1] + 1)]
    assert covered == list(range(length))
    for span, row in zip(spans, rows, strict=True):
        assert row["nats a token"] == np.mean(range(span[0], span[-1] + 1))


def test_exported_weights_repeat_the_trainers_last_evaluation(exported, root, expected):
    run = open_run(exported, "evaluate")
    (row,) = evaluate(run, CONFIG, root=root)
    losses, lengths = expected
    assert row["model"] == "train_hybrid-tiny"
    assert row["targets"] == losses.size
    assert row["ce (nats)"] == pytest.approx(losses.mean(), rel=MEAN_LOSS_TOLERANCE)
    assert row["ce − trainer's"] == 0.0  # the same program on the same arrays
    assert row["bytes a token"] == lengths.sum() / losses.size
    (model,) = json.loads((run.path / "evaluation.json").read_text())["models"]
    assert model["batches"] == BATCHES
    assert np.mean(model["position_nats"]) == pytest.approx(losses.mean(), rel=MEAN_LOSS_TOLERANCE)
    assert model["validation"][0]["file"] == "val.bin"


def test_another_number_of_batches_is_evaluated_and_not_compared(exported, root):
    config = EvaluateConfig(run="tiny", source="export-tiny", batch_size=3, eval_batches=4)
    (row,) = evaluate(open_run(exported, "evaluate"), config, root=root)
    assert row["targets"] == 3 * 4 * T
    assert row["ce − trainer's"] is None


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


def test_weights_that_do_not_repeat_the_trainers_result_are_refused(
    outputs, root, parameters, dataset, expected
):
    write_training_run(outputs, parameters, dataset, ce=expected[0].mean() * (1 + 1e-4))
    run = open_run(outputs, "export")
    export(run, ExportConfig(run="tiny", sources=("train_hybrid-tiny",)))
    run.succeed("completed")
    with pytest.raises(RuntimeError, match="the exported weights give a cross-entropy of"):
        evaluate(open_run(outputs, "evaluate"), CONFIG, root=root)


def test_other_data_than_the_run_was_trained_with_are_refused(exported, root, tmp_path):
    changed = shutil.copytree(root, tmp_path / "root", ignore=shutil.ignore_patterns("data"))
    path = changed / "texts.txt"
    path.write_text(path.read_text().replace("river", "stream"))
    with pytest.raises(ValueError, match=r"validation split of .* has hashes .*was trained with"):
        evaluate(open_run(exported, "evaluate"), CONFIG, root=changed)


def test_a_source_that_is_no_export_run_is_refused(exported, root):
    config = EvaluateConfig(run="tiny", source="train_hybrid-tiny")
    if not (exported / "train_hybrid-tiny").is_dir():
        pytest.fail("the fixture must leave the training run beside the export")
    with pytest.raises(ValueError, match="'train_hybrid-tiny' holds no export"):
        evaluate(open_run(exported, "evaluate"), config, root=root)


def test_an_altered_export_is_refused(exported, root, tmp_path):
    outputs = shutil.copytree(exported, tmp_path / "outputs")
    path = outputs / "export-tiny" / "train_hybrid-tiny" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"'export-tiny' is not verified.*model\.safetensors"):
        evaluate(open_run(outputs, "evaluate"), CONFIG, root=root)
