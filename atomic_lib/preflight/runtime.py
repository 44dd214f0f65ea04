# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine, this data and these kernels, made before a run spends its budget."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from atomic_kernels.gdn2 import gdn2

from atomic_lib.config import TrainConfig
from atomic_lib.data import TokenDataset
from atomic_lib.evidence import RunFolder
from atomic_lib.model import ModelConfig, abstract_parameters

# Relative RMS that a float32 fast path may differ from the token-by-token reference. On a TPU the
# fast path multiplies in three bf16 passes, which the published tolerance puts at 1e-4.
KERNEL_LIMIT = 1e-4
KERNEL_SHAPE = {"batch": 1, "tokens": 160, "heads": 2, "head_dim": 64}
GRADIENT_NAMES = ("q", "k", "v", "g", "b", "w")
# Parameters, two optimiser moments and the gradient, all float32.
BYTES_A_PARAMETER = 4 * 4
CHECKPOINTS_KEPT_AT_ONCE = 1


@dataclass(frozen=True)
class Check:
    """One line of the preflight table."""

    check: str
    found: Any
    wanted: Any
    ok: bool


def _relative_rms(found: jax.Array, wanted: jax.Array) -> float:
    truth = np.asarray(wanted, np.float64)
    return float(np.sqrt(np.mean((np.asarray(found, np.float64) - truth) ** 2 / np.mean(truth**2))))


def _kernel_inputs(seed: int) -> tuple[jax.Array, ...]:
    """Random q, k, v, g, b, w float32 [B, T, H, K] with a strong decay every 37 tokens."""
    shape = tuple(KERNEL_SHAPE.values())
    q, k, v, g, b, w = (
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(seed), 6)
    )
    normalise = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    spike = (jnp.arange(shape[1]) % 37 == 36)[None, :, None, None]
    decay = jnp.where(spike, -50.0, -jax.nn.softplus(g))
    return normalise(q), normalise(k), v, decay, jax.nn.sigmoid(b), jax.nn.sigmoid(w)


def check_kernels(backend: str) -> list[Check]:
    """Compares the chosen GDN-2 backend with the reference: output, gradients, causality."""
    inputs = _kernel_inputs(0)
    cotangent = jax.random.normal(jax.random.key(1), inputs[2].shape)

    def run(name: str) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def read(*operands):
            output, _ = gdn2(*operands, backend=name)
            return jnp.sum(output * cotangent), output

        gradients, output = jax.jit(jax.grad(read, range(6), has_aux=True))(*inputs)
        return output, gradients

    output, gradients = run(backend)
    wanted_output, wanted_gradients = run("reference")
    errors = {"output": _relative_rms(output, wanted_output)}
    for name, found, wanted in zip(GRADIENT_NAMES, gradients, wanted_gradients, strict=True):
        errors[f"gradient of {name}"] = _relative_rms(found, wanted)
    checks = [
        Check(f"GDN-2 {name}, relative error", error, f"<= {KERNEL_LIMIT:g}", error <= KERNEL_LIMIT)
        for name, error in errors.items()
    ]
    return [*checks, _check_causality(backend, inputs, output)]


def _check_causality(backend: str, inputs: Sequence[jax.Array], output: jax.Array) -> Check:
    cut = inputs[0].shape[1] // 2
    other = _kernel_inputs(2)
    mixed = [
        jnp.concatenate([a[:, :cut], b[:, cut:]], axis=1)
        for a, b in zip(inputs, other, strict=True)
    ]
    changed, _ = jax.jit(lambda *operands: gdn2(*operands, backend=backend))(*mixed)
    leaked = int(jnp.sum(changed[:, :cut] != output[:, :cut]))
    return Check("outputs changed by later tokens", leaked, 0, leaked == 0)


def check_parameters(model_config: ModelConfig) -> Check:
    """Compares the model's shapes with the count its configuration states. Allocates nothing."""
    leaves = jax.tree.leaves(abstract_parameters(model_config))
    found = sum(leaf.size for leaf in leaves)
    wanted = model_config.parameter_count
    return Check("parameters", found, wanted, found == wanted)


def check_devices(config: TrainConfig) -> Check:
    """Whether the batch and the mesh fit the devices that are here."""
    devices = jax.devices()
    found = f"{len(devices)} x {devices[0].device_kind}"
    wanted = f"batch {config.batch_size} over data and fsdp {config.fsdp}"
    config.require_devices(len(devices))
    return Check("devices", found, wanted, True)


def check_space(run: RunFolder, model_config: ModelConfig, keep_checkpoints: int) -> list[Check]:
    """Whether the disk holds the checkpoints and the memory holds the training state."""
    state_bytes = model_config.parameter_count * BYTES_A_PARAMETER
    needed_disk = state_bytes * (keep_checkpoints + CHECKPOINTS_KEPT_AT_ONCE)
    free_disk = shutil.disk_usage(run.path).free
    free_memory = _free_device_memory() or psutil.virtual_memory().available
    amounts = [("disk", free_disk, needed_disk), ("memory", free_memory, state_bytes)]
    return [
        Check(f"{name} free (GB)", free / 1e9, f">= {needed / 1e9:.2f}", free >= needed)
        for name, free, needed in amounts
    ]


def _free_device_memory() -> int | None:
    statistics = jax.devices()[0].memory_stats()  # None on a CPU
    if not statistics:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def check_data(config: TrainConfig, dataset: TokenDataset, vocab_size: int) -> list[Check]:
    """Whether token ids fit the vocabulary and both splits fill a batch."""
    tokens = dataset.train_batch(
        config.data_seed, 0, batch_size=config.batch_size, sequence_length=config.sequence_length
    )
    windows = (len(dataset.validation) - 1) // config.sequence_length
    largest = int(tokens.max())
    return [
        Check("largest token id", largest, f"< {vocab_size}", largest < vocab_size),
        Check(
            "validation windows", windows, f">= {config.batch_size}", windows >= config.batch_size
        ),
    ]


def check_runtime(
    run: RunFolder, config: TrainConfig, dataset: TokenDataset
) -> list[dict[str, Any]]:
    """Runs every check, writes runtime-preflight.json and returns the table's rows.

    Raises RuntimeError naming the failed checks, or ValueError if the batch does not fit the
    devices; either leaves FAILED.json.
    """
    model_config = config.model_config
    steps: list[Callable[[], Check | list[Check]]] = [
        lambda: check_devices(config),
        lambda: check_parameters(model_config),
        lambda: check_space(run, model_config, config.keep_checkpoints),
        lambda: check_data(config, dataset, model_config.vocab_size),
        lambda: check_kernels(config.kernel_backend),
    ]
    checks: list[Check] = []
    with run.recording():
        for number, step in enumerate(steps):
            run.progress("preflight", number, len(steps), "checking devices, data and kernels")
            made = step()
            checks.extend(made if isinstance(made, list) else [made])
        rows = [asdict(check) for check in checks]
        run.write_json("runtime-preflight.json", {"checks": rows, "ok": all(c.ok for c in checks)})
        failed = [f"{c.check}: {c.found} (wanted {c.wanted})" for c in checks if not c.ok]
        if failed:
            raise RuntimeError("preflight refused this run: " + "; ".join(failed))
    return rows
