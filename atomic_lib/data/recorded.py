# SPDX-License-Identifier: Apache-2.0
"""Opens a run's dataset and writes down what it is."""

from pathlib import Path

from atomic_lib.config import TrainConfig
from atomic_lib.data.corpus import open_dataset
from atomic_lib.data.dataset import TokenDataset
from atomic_lib.evidence import RunFolder


def open_run_dataset(run: RunFolder, config: TrainConfig, *, root: Path) -> TokenDataset:
    """Opens the dataset of a training run; building it, if need be, shows as the run's progress.

    The token files go into manifest.json with their digests, and what they were made from into
    provenance.json. Raises as `open_dataset` does.
    """
    with run.recording():
        dataset = open_dataset(
            config.corpus,
            vocab_size=config.model_config.vocab_size,
            root=root,
            progress=run.progress,
        )
        files = [file.path for split in (dataset.train, dataset.validation) for file in split.files]
        run.record_inputs(*files)
        run.write_json(
            "provenance.json",
            {"corpus": config.corpus, "preset": config.preset, "dataset": dataset.manifest},
        )
    return dataset
