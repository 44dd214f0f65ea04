# SPDX-License-Identifier: Apache-2.0
"""One mesh of devices, and the rules that place parameters and batches on it.

Axes: "data" splits the batch only; "fsdp" splits the batch and every parameter that has an axis to
split. Device (i, j) holds batch slice i * fsdp + j. A forward pass gathers each matrix over "fsdp"
where it is used; its gradient comes back as a sum over both axes, scattered over "fsdp".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

DATA, FSDP = "data", "fsdp"
BATCH_AXES = (DATA, FSDP)

# VMEM that XLA may use for one of its own operations. For two blocks of the hybrid on v5e its
# estimate was 46.2 ms at the default, 16 MiB; 44.2 at 32, 45.5 at 64, 47.4 at 96.
TPU_COMPILER_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "32768"}


@dataclass(frozen=True)
class Placement:
    """The mesh of one run and where its arrays live."""

    mesh: Mesh

    @classmethod
    def over(
        cls, *, data_parallel: int | None, fsdp: int, devices: Sequence[Any] | None = None
    ) -> "Placement":
        """Builds the mesh from `devices` (all of this machine's by default).

        data_parallel None takes what fsdp leaves. Raises ValueError if there are too few devices.
        """
        devices = jax.devices() if devices is None else devices
        data = data_parallel or len(devices) // fsdp
        if not 0 < data * fsdp <= len(devices):
            raise ValueError(
                f"data_parallel {data_parallel} x fsdp {fsdp} needs {max(data, 1) * fsdp} devices; "
                f"this machine has {len(devices)}"
            )
        return cls(Mesh(np.array(devices[: data * fsdp]).reshape(data, fsdp), BATCH_AXES))

    @property
    def devices(self) -> int:
        """Devices in the mesh, each of which gets an equal share of the batch."""
        return self.mesh.size

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu". They need not be this machine's."""
        return self.mesh.devices.flat[0].platform

    @property
    def compiler_options(self) -> dict[str, str]:
        """What programs for these devices are compiled with."""
        return TPU_COMPILER_OPTIONS if self.platform == "tpu" else {}

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The first axis is split over every device."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """A matrix is split over "fsdp" on its first axis that divides; all else is replicated."""
        size = self.mesh.shape[FSDP]
        if size > 1 and len(shape) >= 2:
            for axis, length in enumerate(shape):
                if length % size == 0:
                    return PartitionSpec(*[None] * axis, FSDP)
        return PartitionSpec()

    def of(self, tree: Any) -> Any:
        """A NamedSharding for every array (or shape) of a pytree of parameters or their moments."""
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, self.spec(leaf.shape)), tree)

    def gather(self, shards: Mapping[str, Array], shapes: Mapping[str, tuple]) -> dict[str, Array]:
        """Whole parameters from this device's shards; for use inside shard_map.

        `shapes` are those of the whole parameters. Differentiating through it sums gradients over
        "fsdp" and returns each device its shard.
        """
        whole = {}
        for name, shard in shards.items():
            spec = self.spec(shapes[name])
            if FSDP in spec:
                shard = jax.lax.all_gather(shard, FSDP, axis=spec.index(FSDP), tiled=True)
            whole[name] = shard
        return whole

    def sum_gradients(
        self, gradients: Mapping[str, Array], shapes: Mapping[str, tuple]
    ) -> dict[str, Array]:
        """Sums over the devices what `gather` has not summed; for use inside shard_map."""
        return {
            name: jax.lax.psum(gradient, DATA if FSDP in self.spec(shapes[name]) else BATCH_AXES)
            for name, gradient in gradients.items()
        }

    def local_rows(self, batch_size: int) -> NDArray[np.int64]:
        """The rows of a batch that this process's devices hold, in ascending order."""
        held = self.batch.addressable_devices_indices_map((batch_size,)).values()
        return np.unique(np.concatenate([np.arange(batch_size)[index] for index in held]))

    def place_batch(self, rows: np.ndarray) -> Array:
        """Puts this process's rows of a batch on its devices; the result is the global batch.

        rows [n, T + 1] are those of `local_rows`, in its order.
        """
        here = sum(d.process_index == jax.process_index() for d in self.mesh.devices.flat)
        batch_size = len(rows) * self.devices // here
        held = self.local_rows(batch_size)

        def part(index: Any) -> np.ndarray:  # a tuple of slices
            wanted = np.arange(batch_size)[index[0]]
            return rows[np.searchsorted(held, wanted)]

        return jax.make_array_from_callback((batch_size, *rows.shape[1:]), self.batch, part)
