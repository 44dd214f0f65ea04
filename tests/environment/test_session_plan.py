# SPDX-License-Identifier: Apache-2.0
"""Protects the first cell's decisions, one test a kind of session.

Oracle: what each session needs, written by hand from how such sessions fail: an image whose libtpu
belongs to another jax, a GPU image whose jax is too old, a push that got no accelerator, a session
without network, a laptop. The decision is a pure function, so no such machine is needed.
"""

import dataclasses

import pytest

from atomic_lib.environment import (
    Facts,
    accelerator_present,
    accelerator_refusal,
    backend_refusal,
    decide,
    gather_facts,
)
from atomic_lib.environment.prepare import foreign_libtpu
from atomic_lib.notebook import Session

READY = Facts(
    host="own", python="3.12.11", tpu_chips=0, gpus=0, jax_imported=False, jax="0.11.1",
    libtpu="0.0.46.1", libtpu_wanted="libtpu==0.0.46.*", cuda_plugins=(), unmet=(), network=None,
    wheels=None, jax_platforms=None, tpu_library_path=None,
)  # fmt: skip
RANGE = 'jax<0.13,>=0.11.1; python_version >= "3.12"'
TPU_LINE = 'jax[tpu]; sys_platform == "linux" and platform_machine == "x86_64"'


def session(host, **changes):
    return dataclasses.replace(READY, host=host, **changes)


KAGGLE_TPU = session("kaggle", tpu_chips=8, libtpu="0.0.17", unmet=(TPU_LINE, "papermill>=2.6"),
                     network=True)  # fmt: skip
KAGGLE_GPU = session("kaggle", gpus=2, jax="0.7.2", libtpu=None, unmet=(RANGE, TPU_LINE),
                     network=True)  # fmt: skip
COLAB_TPU = session("colab", tpu_chips=1, network=None)
COLAB_GPU = session("colab", gpus=1, cuda_plugins=("jax-cuda12-plugin",), libtpu=None,
                    unmet=(TPU_LINE,), network=True)  # fmt: skip
INSTALLS = {
    # The image's jax matches and stays; its libtpu does not.
    "kaggle tpu": (KAGGLE_TPU, ("jax[tpu]==0.11.1", "papermill>=2.6")),
    "kaggle tpu, old jax": (
        dataclasses.replace(KAGGLE_TPU, jax="0.7.2", unmet=(RANGE,)),
        ("jax[tpu]<0.13,>=0.11.1",),
    ),
    "kaggle gpu": (KAGGLE_GPU, ("jax[cuda12]<0.13,>=0.11.1",)),  # and no libtpu
    "kaggle gpu, no plugin": (
        session("kaggle", gpus=1, network=True),
        ("jax[cuda12]==0.11.1",),
    ),
    "kaggle, no accelerator": (
        session("kaggle", libtpu=None, unmet=(TPU_LINE, "rich>=13"), network=True),
        ("jax==0.11.1", "rich>=13"),
    ),
    "colab tpu": (COLAB_TPU, ()),
    "colab gpu": (COLAB_GPU, ()),
    "laptop": (READY, ()),
}


@pytest.mark.parametrize("name", INSTALLS)
def test_only_what_is_missing_is_installed(name):
    facts, install = INSTALLS[name]
    plan = decide(facts)
    assert plan.refusal is None
    assert plan.install == install


@pytest.mark.parametrize(
    ("facts", "platforms"),
    [
        (KAGGLE_TPU, None),
        (COLAB_TPU, None),
        (KAGGLE_GPU, "cuda,cpu"),
        (COLAB_GPU, "cuda,cpu"),
        (session("kaggle"), "cpu"),
        (READY, "cpu"),
        (session("own", gpus=1, cuda_plugins=("jax-cuda13-plugin",)), "cuda,cpu"),
        (session("own", gpus=1), None),
    ],
    ids=lambda value: value.lines()[0] if isinstance(value, Facts) else str(value),
)
def test_jax_is_told_its_platform_where_it_would_err(facts, platforms):
    assert decide(facts).environment.get("JAX_PLATFORMS") == platforms


def test_a_library_path_of_another_package_is_removed_on_a_tpu_only():
    path = "/usr/lib/libtpu.so"
    plan = decide(dataclasses.replace(KAGGLE_TPU, tpu_library_path=path))
    assert plan.unset == ("TPU_LIBRARY_PATH",)
    assert path in plan.notes[0]
    assert decide(dataclasses.replace(READY, tpu_library_path=path)).unset == ()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (session("own", unmet=("flax<0.13,>=0.12.9",)), "lacks flax<0.13,>=0.12.9; run `make run`"),
        (dataclasses.replace(KAGGLE_TPU, jax_imported=True), "restart the kernel"),
        (dataclasses.replace(KAGGLE_TPU, network=False), "no network: turn Internet on"),
    ],
    ids=["laptop", "jax imported", "no network"],
)
def test_a_session_that_cannot_go_on_is_told_what_to_do(facts, message):
    plan = decide(facts)
    assert message in (plan.refusal or "")
    assert plan.install == ()


def test_attached_packages_serve_where_the_network_is_off():
    facts = dataclasses.replace(KAGGLE_TPU, network=False, wheels="/kaggle/input/wheels")
    assert decide(facts).install[:2] == ("--no-index", "--find-links=/kaggle/input/wheels")


def test_another_package_may_be_added_after_jax_was_imported():
    facts = session("kaggle", unmet=("rich>=13",), network=True, jax_imported=True)
    assert decide(facts).install == ("jax==0.11.1", "rich>=13")


def test_a_gpu_that_jax_cannot_use_is_said():
    (note,) = decide(session("own", gpus=1)).notes
    assert 'pip install "jax[cuda12]==0.11.1"' in note
    (note,) = decide(dataclasses.replace(COLAB_TPU, jax_platforms="cpu")).notes
    assert "will not be used" in note


@pytest.mark.parametrize("wanted", [None, "tpu", "gpu", "any"])
@pytest.mark.parametrize("found", ["tpu", "gpu", "none"])
def test_a_run_starts_where_its_accelerator_is(wanted, found):
    facts = session("kaggle", tpu_chips=8 * (found == "tpu"), gpus=int(found == "gpu"))
    allowed = wanted in (None, found) or (wanted == "any" and found != "none")
    refusal = accelerator_refusal(wanted, facts)
    assert (refusal is None) == allowed
    if refusal is not None:
        assert f"accelerator: {wanted!r} is asked for" in refusal
        assert "push it again" in refusal
    backend = "cpu" if found == "none" else found
    assert (backend_refusal(wanted, backend) is None) == allowed


def test_an_accelerator_switched_off_by_a_variable_does_not_count():
    assert "has none" in accelerator_refusal(
        "tpu", dataclasses.replace(COLAB_TPU, jax_platforms="cpu")
    )


def test_facts_are_found_in_files_and_variables(tmp_path):
    (tmp_path / "requirements.txt").write_text("numpy\n")
    for name in ("dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio", "kaggle/working/x",
                 "kaggle/input/datasets/me/wheels/a.whl"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    facts = gather_facts(
        tmp_path / "requirements.txt", device_root=tmp_path,
        environment={"TPU_LIBRARY_PATH": "/lib/libtpu.so"},
    )  # fmt: skip
    assert (facts.host, facts.tpu_chips, facts.gpus) == ("kaggle", 2, 0)
    assert facts.network is None  # nothing to install, so nobody asked
    assert facts.wheels.endswith("datasets/me/wheels")
    assert facts.tpu_library_path == "/lib/libtpu.so"
    assert facts.libtpu_wanted.startswith("libtpu==")
    assert facts.lines()[0].startswith("Kaggle session, Python 3.")
    assert "2 TPU chips" in facts.lines()[0]


@pytest.mark.parametrize("name", ["nvidia0", "accel7", "vfio/3"])
@pytest.mark.parametrize("host", ["colab", "own"])
def test_each_device_file_is_an_accelerator(tmp_path, name, host):
    (tmp_path / "requirements.txt").write_text("")
    file = tmp_path / "dev" / name
    file.parent.mkdir(parents=True)
    file.touch()
    if host == "colab":
        (tmp_path / "content").mkdir()
    facts = gather_facts(tmp_path / "requirements.txt", device_root=tmp_path, environment={})
    assert facts.host == host
    assert facts.accelerator == ("gpu" if name == "nvidia0" else "tpu")
    assert accelerator_present(tmp_path)


def test_control_files_are_no_accelerators(tmp_path):
    for name in ("vfio/vfio", "nvidiactl", "null"):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert not accelerator_present(tmp_path)


MAPS = """7f0000000000-7f0000001000 r-xp 00000000 08:01 123 /usr/lib/libc.so.6
7f0000002000-7f0000003000 r-xp 00000000 08:01 124 {path}
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
"""


def test_the_libtpu_that_was_loaded_is_compared_with_the_package(tmp_path):
    own = MAPS.format(path=tmp_path / "libtpu" / "libtpu.so")
    folders = [str(tmp_path / "libtpu")]
    assert foreign_libtpu(own, folders) is None
    assert foreign_libtpu(MAPS.format(path="/lib/other.so"), folders) is None
    other = "/usr/lib/torch_xla/libtpu.so"
    assert foreign_libtpu(MAPS.format(path=other), folders) == other
    assert foreign_libtpu(own, []) is not None


def test_a_notebook_refuses_parameters_whose_accelerator_is_not_here(request):
    session = Session(root=request.config.rootpath, started_at=0.0, facts=READY)
    with pytest.raises(RuntimeError, match=r"accelerator: .tpu. is asked for.*a machine that has"):
        session.read_parameters("train_hybrid", {"run": "seed1"})
    loaded = session.read_parameters("train_hybrid", {"run": "seed1", "accelerator": "none"})
    assert loaded.config.accelerator is None
