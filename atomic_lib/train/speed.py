# SPDX-License-Identifier: Apache-2.0
"""How fast a run is against what its devices could do, and how much memory they hold."""

import jax

# bf16 products on dense operands, FLOP/s a device as JAX counts devices (a v2 or v3 device is one
# core of a chip). Makers' data sheets; a kind that is not listed has no MFU.
PEAK_FLOPS = {
    "TPU v2": 23e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "Tesla T4": 65e12,
    "Tesla P100-PCIE-16GB": 21.2e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def model_flops_utilisation(
    tokens_per_second: float, *, flops_per_token: float, devices: int, device_kind: str
) -> float | None:
    """Fraction of the devices' peak that the model's own FLOPs use; None for an unlisted kind."""
    peak = PEAK_FLOPS.get(device_kind)
    return None if peak is None else tokens_per_second * flops_per_token / (peak * devices)


def device_memory_bytes(device: jax.Device) -> int | None:
    """Bytes in use on one device, or None where the platform does not tell (a CPU) or the device
    is another process's."""
    if device.process_index != jax.process_index():
        return None
    statistics = device.memory_stats()
    return statistics.get("bytes_in_use") if statistics else None
