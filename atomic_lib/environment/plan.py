# SPDX-License-Identifier: Apache-2.0
"""What to do about a session before jax is imported: a pure function of its facts.

Rules, each for a way in which a session was seen to fail:
  - a TPU needs the libtpu that its jax asks for. Kaggle's TPU image installs jax[tpu] and then
    pins libtpu 0.0.17 for torch_xla; jax would load that one;
  - TPU_LIBRARY_PATH makes jax load a library of another package: it is unset on a TPU;
  - a GPU needs jax's CUDA plugin of the same version, else jax computes on the CPU without a word;
  - libtpu (684 MB) is not installed on a hosted machine that has no TPU;
  - what already matches keeps its version: an installed jax is pinned while others are added;
  - without an accelerator JAX_PLATFORMS is cpu, since an installed libtpu prints start-up errors.
"""

from dataclasses import dataclass, field
from typing import Literal

from packaging.requirements import Requirement

from atomic_lib.environment.facts import Facts

Accelerator = Literal["tpu", "gpu", "any"]

# T4, P100 and L4 sessions have drivers of CUDA 12; a driver serves the plugins up to its own.
HOSTED_CUDA = "cuda12"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """install: arguments of pip; environment: variables to set where they are not set; unset:
    variables to remove; refusal: why this session cannot go on, or None; notes: what to tell."""

    install: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    refusal: str | None = None
    notes: tuple[str, ...] = ()


def decide(facts: Facts) -> Plan:
    """The plan for a session. Depends on nothing but `facts`."""
    wanted = _packages(facts)
    if wanted and facts.host == "own":
        return Plan(refusal=(
            f"this Python lacks {', '.join(wanted)}; run `make run` once in the repository's "
            "root, or `pip install -r requirements.txt`"
        ))  # fmt: skip
    if facts.jax_imported and any(line.startswith("jax") for line in _changed(wanted, facts)):
        return Plan(refusal=(
            f"{', '.join(wanted)} must be installed before jax is imported: restart the kernel and "
            "run the first cell first"
        ))  # fmt: skip
    install = wanted
    if wanted and facts.network is False:
        if facts.wheels is None:
            return Plan(refusal=(
                f"{', '.join(wanted)} must be installed, and this session has no network: turn "
                "Internet on in the session's settings, or attach a dataset with the wheels"
            ))  # fmt: skip
        install = ("--no-index", f"--find-links={facts.wheels}", *wanted)
    environment, unset, notes = _variables(facts)
    return Plan(install=install, environment=environment, unset=unset, notes=notes)


def _packages(facts: Facts) -> tuple[str, ...]:
    """The packages to install, as pip takes them; jax with the extra of this machine, or none."""
    if facts.host == "own":  # requirements.txt as it stands; a GPU's plugin is its owner's choice
        return facts.unmet
    lines = [Requirement(line) for line in facts.unmet]
    jax = next((line for line in lines if line.name == "jax" and not line.extras), None)
    others = [str(line) for line in lines if line.name != "jax"]
    libtpu_differs = any(line.name == "jax" and "tpu" in line.extras for line in lines)
    extra = None
    if facts.tpu_chips and (jax or libtpu_differs):
        extra = "tpu"
    elif facts.accelerator == "gpu" and (jax or not facts.cuda_plugins):
        extra = HOSTED_CUDA
    if jax is None and extra is None and not others:
        return ()
    # The range where jax itself has to change, else exactly the jax that is there.
    version = str(jax.specifier) if jax else f"=={facts.jax}"
    name = f"jax[{extra}]" if extra else "jax"
    return (f"{name}{version}", *others)


def _changed(wanted: tuple[str, ...], facts: Facts) -> list[str]:
    """What is really installed: all but the pin of the jax that is there."""
    return [line for line in wanted if line != f"jax=={facts.jax}"]


def _variables(facts: Facts) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    environment: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    notes: list[str] = []
    if facts.accelerator == "none":
        environment["JAX_PLATFORMS"] = "cpu"
    elif facts.accelerator == "gpu":
        if facts.host != "own" or facts.cuda_plugins:
            environment["JAX_PLATFORMS"] = "cuda,cpu"
        else:
            notes.append(
                "jax has no CUDA plugin here and will compute on the CPU: "
                f'pip install "jax[cuda12]=={facts.jax}" (or cuda13)'
            )
    if facts.tpu_chips and facts.tpu_library_path is not None:
        unset = ("TPU_LIBRARY_PATH",)
        notes.append(
            f"TPU_LIBRARY_PATH was {facts.tpu_library_path} and is removed: jax loads the libtpu "
            "that belongs to it"
        )
    if facts.accelerator != "none" and facts.jax_platforms == "cpu":
        notes.append("JAX_PLATFORMS is cpu: the accelerator here will not be used")
    return environment, unset, tuple(notes)


def accelerator_refusal(wanted: Accelerator | None, facts: Facts) -> str | None:
    """Why a run that asks for an accelerator cannot start in this session, or None."""
    found = facts.accelerator if facts.jax_platforms != "cpu" else "none"
    if wanted is None or wanted == found or (wanted == "any" and found != "none"):
        return None
    what = {"tpu": "a TPU", "gpu": "a GPU", "any": "an accelerator"}[wanted]
    where = {
        "kaggle": "choose one under Settings, Accelerator, and start the session again (a pushed "
        "notebook can start without one: push it again)",
        "colab": "choose one under Runtime, Change runtime type",
        "own": "run it on a machine that has one",
    }[facts.host]
    return (
        f"accelerator: {wanted!r} is asked for, but this session has "
        f'{"none" if found == "none" else found.upper()}; {where}, or set accelerator to "none" '
        f"to go on without {what}"
    )


def backend_refusal(wanted: Accelerator | None, backend: str) -> str | None:
    """Why jax's default backend ("cpu", "gpu" or "tpu") is not what a run asks for, or None."""
    if wanted is None or wanted == backend or (wanted == "any" and backend != "cpu"):
        return None
    return (
        f"accelerator: {wanted!r} is asked for, but jax started on {backend!r}: its driver does "
        "not work here. Restart the session; the first cell prints which packages it found."
    )
