# SPDX-License-Identifier: Apache-2.0
"""Which TPU a program is compiled for, and whether this machine can compile for it."""

import re
from dataclasses import dataclass
from importlib import metadata

from atomic_kernels.schedule import ScheduleUnavailableError, require_compiler
from atomic_kernels.schedule.chips import CHIPS, Chip, chip_for_topology
from packaging.requirements import Requirement

# Chips of a slice -> its grid, for names such as "v5e-8" (Cloud TPU, v5e and v6e system pages).
SLICES = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
    256: (16, 16),
}  # fmt: skip
# Slices up to this many chips sit on one host; larger ones have hosts of 2 x 2 chips.
SINGLE_HOST_CHIPS = 8
# Of its 16 (32) GiB the compiler keeps 0.25 for itself: its out-of-memory message says "of 15.75G".
RESERVED_HBM_BYTES = 2**28


class AotUnavailableError(RuntimeError):
    """This machine cannot compile for a TPU; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A TPU slice: `topology` in the compiler's words, e.g. "v5e:2x4"."""

    topology: str

    @classmethod
    def named(cls, name: str) -> "Target":
        """The slice called "v5e:2x4" or "v5e-8". Raises ValueError for any other form."""
        match = re.fullmatch(r"(\w+)-(\d+)", name)
        if match and match[1] in CHIPS and int(match[2]) in SLICES:
            rows, columns = SLICES[int(match[2])]
            return cls(topology=f"{match[1]}:{rows}x{columns}")
        match = re.fullmatch(r"(\w+):(\d+)x(\d+)", name)
        if not match or match[1] not in CHIPS or (int(match[2]), int(match[3])) not in {
            *SLICES.values()
        }:  # fmt: skip
            raise ValueError(
                f"topology: {name!r} is not known; write CHIP-COUNT or CHIP:ROWSxCOLUMNS with CHIP "
                f"one of {sorted(CHIPS)} and COUNT one of {[*SLICES]}, e.g. 'v5e-8' or 'v5e:2x4'"
            )
        return cls(topology=name)

    @property
    def chip(self) -> Chip:
        """Clock, peaks and memory of one chip."""
        return chip_for_topology(self.topology)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of chips."""
        rows, columns = self.topology.partition(":")[2].split("x")
        return int(rows), int(columns)

    @property
    def chips(self) -> int:
        """Chips of the whole slice."""
        rows, columns = self.grid
        return rows * columns

    @property
    def host_grid(self) -> tuple[int, int]:
        """Rows and columns of the chips of one host."""
        return self.grid if self.chips <= SINGLE_HOST_CHIPS else (2, 2)

    @property
    def hosts(self) -> int:
        """Hosts of the slice: one process each."""
        rows, columns = self.host_grid
        return self.chips // (rows * columns)

    @property
    def hbm_limit_bytes(self) -> int:
        """Memory of one chip that a program may use."""
        return self.chip.hbm_bytes - RESERVED_HBM_BYTES

    def __str__(self) -> str:
        return f"{self.chip.name}-{self.chips}"


def require_aot_compiler() -> None:
    """Raises AotUnavailableError, saying what to do, where no matching TPU compiler can run.

    jax's own metadata names the libtpu that belongs to it; another one may compile to something
    else or abort, so it is refused.
    """
    try:
        require_compiler()
    except ScheduleUnavailableError as error:
        raise AotUnavailableError(str(error)) from error
    wanted = libtpu_requirement()
    found = metadata.version("libtpu")
    if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        raise AotUnavailableError(
            f"libtpu {found} does not belong to jax {metadata.version('jax')}, which asks for "
            f"libtpu{wanted.specifier}: install it with "
            f"pip install 'jax[tpu]=={metadata.version('jax')}'"
        )


def libtpu_requirement() -> Requirement | None:
    """The libtpu that the installed jax names under its extra "tpu"; None if it names none."""
    for line in metadata.requires("jax") or []:
        requirement = Requirement(line)
        if requirement.name == "libtpu" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": "tpu"})
        ):
            return requirement
    return None
