# SPDX-License-Identifier: Apache-2.0
"""Token files, the datasets made of them, and the text they are built from. Needs no jax."""

from atomic_lib.data.build import build_dataset
from atomic_lib.data.corpus import find_kaggle_dataset, open_dataset, parse_corpus
from atomic_lib.data.dataset import TokenDataset, TokenSplit, open_token_folder
from atomic_lib.data.recorded import open_run_dataset
from atomic_lib.data.segments import segment_ids_from_tokens, targets_inside_documents
from atomic_lib.data.sources import TextSource, builtin_source, file_source, huggingface_source
from atomic_lib.data.token_file import TokenFile
from atomic_lib.data.tokenizer import Gpt2Tokenizer, bytes_per_token, gpt2_tokenizer

__all__ = [
    "Gpt2Tokenizer",
    "TextSource",
    "TokenDataset",
    "TokenFile",
    "TokenSplit",
    "build_dataset",
    "builtin_source",
    "bytes_per_token",
    "file_source",
    "find_kaggle_dataset",
    "gpt2_tokenizer",
    "huggingface_source",
    "open_dataset",
    "open_run_dataset",
    "open_token_folder",
    "parse_corpus",
    "segment_ids_from_tokens",
    "targets_inside_documents",
]
