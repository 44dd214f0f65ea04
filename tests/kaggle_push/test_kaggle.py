# SPDX-License-Identifier: Apache-2.0
"""Protects what `make kaggle` writes: the kaggle package accepts it, and the code in it works.

Oracle: the kaggle package itself. Its own `kernels_push` and `dataset_create_new` read and check
the folders; only its client is replaced, by one that keeps the request instead of sending it.
"""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from kaggle.api import kaggle_api_extended as kaggle_api
from kaggle.api.kaggle_api_extended import KaggleApi
from requests import HTTPError

from atomic_lib.kaggle import write_push
from atomic_lib.kaggle.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


class Recorder(KaggleApi):
    """The kaggle package with a client that answers nothing and keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.config_values = {self.CONFIG_NAME_USER: "somebody"}
        self.requests, self.files = [], []

    def build_kaggle_client(self):
        def keep(request):
            self.requests.append(request)
            return types.SimpleNamespace(error="", status="ok", url="")

        client = types.SimpleNamespace(
            kernels=types.SimpleNamespace(
                kernels_api_client=types.SimpleNamespace(save_kernel=keep)
            ),
            datasets=types.SimpleNamespace(
                dataset_api_client=types.SimpleNamespace(create_dataset=keep)
            ),
        )
        return _Context(client)

    def dataset_status(self, dataset, *arguments):
        raise HTTPError("no such dataset yet")

    def upload_files(self, request, resources, folder, *arguments):
        self.files = sorted(path.name for path in Path(folder).iterdir())
        self.requests.append(request)


class _Context:
    def __init__(self, client):
        self.client = client

    def __enter__(self):
        return self.client

    def __exit__(self, *_):
        return None


@pytest.fixture(scope="module")
def push(tmp_path_factory):
    return write_push(ROOT, tmp_path_factory.mktemp("push") / "kaggle", owner="somebody")


@pytest.fixture
def kaggle(monkeypatch):
    monkeypatch.setattr(kaggle_api, "_warn_if_retired_accelerator", refuse_retired)
    return Recorder()


def refuse_retired(shape):
    assert (shape or "").lower() not in kaggle_api._RETIRED_ACCELERATORS


def test_the_kaggle_package_accepts_every_kernel(push, kaggle, capsys):
    for folder in push.kernels:
        kaggle.kernels_push(str(folder))
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""  # its warnings, such as a title that is not the slug
    by_slug = {request.slug: request for request in kaggle.requests}
    assert len(by_slug) == len(push.kernels) >= 8
    seed = by_slug["somebody/atomic-train-hybrid-seed1"]
    assert seed.machine_shape == "TpuV5E8"
    assert seed.enable_tpu
    assert seed.enable_internet
    assert seed.is_private
    assert seed.dataset_data_sources == [
        "somebody/atomic-gdn2-code", "windmaple/openwebtext-gpt2",
    ]  # fmt: skip
    assert 'run: str = \\"seed1\\"' in seed.text
    smoke = by_slug["somebody/atomic-train-hybrid-smoke"]
    assert not smoke.enable_tpu
    assert smoke.dataset_data_sources == ["somebody/atomic-gdn2-code"]
    checked = by_slug["somebody/atomic-preflight-seed1"]
    assert checked.machine_shape == "TpuV5E8"  # it checks a run that asks for a TPU
    assert not any("berlm" in slug or "export" in slug for slug in by_slug)


def test_the_kaggle_package_accepts_the_code_dataset(push, kaggle):
    kaggle.dataset_create_new(str(push.code), dir_mode="zip")
    request = kaggle.requests[0]
    assert (request.owner_slug, request.slug) == ("somebody", "atomic-gdn2-code")
    assert request.is_private
    assert kaggle.files == sorted([
        "LICENSE", "atomic_lib", "dataset-metadata.json", "kernels", "params", "pyproject.toml",
        "requirements.txt",
    ])  # fmt: skip


def test_a_pushed_notebooks_first_cells_run_on_the_attached_code(push, tmp_path):
    """The dataset mounted read-only as Kaggle does it, and the notebook in another folder."""
    mounted = tmp_path / "input" / "atomic-gdn2-code"
    mounted.parent.mkdir()
    push.code.rename(mounted)
    folder = next(path for path in push.kernels if path.name == "train_baseline-smoke")
    (file,) = folder.glob("*.ipynb")
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"][:3]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace('"/kaggle/input"', repr(str(mounted.parent)))
    working = tmp_path / "working"
    working.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code + "\nprint(session.root, config.run, loaded.run_id)"],
            cwd=working, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        mounted.rename(push.code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == [str(mounted), "smoke", "train_baseline-smoke"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "owner: '' is no Kaggle user name"),
        (["Some Body"], "owner: 'Some Body'"),
        (["somebody", "evaluate/seeds"], "evaluate/seeds reads the folders of other runs"),
        (["somebody", "train_hybrid/sed1"], "did you mean train_hybrid/seed1"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    arguments, message, tmp_path, capsys
):
    assert main([*arguments, "--target", str(tmp_path / "kaggle")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "kaggle").exists()


def test_the_command_says_what_uploads_it(tmp_path, capsys):
    target = tmp_path / "kaggle"
    assert main(["somebody", "train_baseline/seed2", "--target", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        f"kaggle datasets create -p {target}/code --dir-mode zip",
        f"kaggle kernels push -p {target}/kernels/train_baseline-seed2",
    ]
