# SPDX-License-Identifier: Apache-2.0
"""Protects: Hugging Face transformers still loads models beside this repository.

transformers imports an optional PyPI package named `kernels`; a package of ours of that name on
sys.path breaks every model's loading. The folder kernels/ here must therefore not be a package.
"""

import subprocess
import sys

import pytest

LOAD_A_MODEL = """
import sys, torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
logits = model(torch.arange(8)[None]).logits
assert logits.shape == (1, 8, 64) and torch.isfinite(logits).all()
"""


def test_the_kernels_folder_is_no_package(request):
    assert not (request.config.rootpath / "kernels" / "__init__.py").exists()


def test_transformers_loads_a_model_with_the_repository_on_its_path(request, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is installed on the Python 3.11 lane only")
    root = request.config.rootpath
    done = subprocess.run(
        [sys.executable, "-c", LOAD_A_MODEL, str(tmp_path / "model")],
        cwd=root,
        env={"PATH": "", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
