# SPDX-License-Identifier: Apache-2.0
"""Finds the compiler's texts about one operation in the folder that a compile left.

The compiler names them `TIME-INSTRUCTION-NN-PASS.txt`. Operations that are equal are compiled
once, under the name of the first; a map of duplicates tells which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from atomic_kernels.schedule.bundles import ScheduleFormatError

_PASSES = {
    "final": "final_bundles",
    "final_units": "final_hlo-static-per-bundle-utilization",
    "packed": "packed-bundles-post-ra",
    "packed_units": "pre-delay_hlo-static-per-bundle-utilization",
    "listing": "post-delay-converter",
}
DUPLICATES_PASS = "deduplication-map"
# What the compiler is asked to write. Of the ~70 texts it can write for each kernel only these
# are read; all of them are 100 MB a kernel and double the compile time.
DUMPED_PASSES = "|".join(
    [
        "final_bundles",
        "packed-bundles-post-ra",
        "post-delay-converter",
        "per-bundle-utilization",
        DUPLICATES_PASS,
    ]
)
_NAME = re.compile(rf"^\d+-(.+)-\d+-({'|'.join(map(re.escape, _PASSES.values()))})\.txt$")


@dataclass(frozen=True, kw_only=True)
class ScheduleTexts:
    """The compiler's texts about one operation.

    final and packed are its bundles after and before the waits are left to the hardware, each
    with its unit table; listing is the region listing, which holds the trip counts.
    """

    final: str
    final_units: str
    packed: str
    packed_units: str
    listing: str


class Dump:
    """The texts in a folder, by operation and pass; the folder is listed once, at the start."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._paths: dict[str, dict[str, Path]] = {}
        self._first: dict[str, str] = {}
        for path in sorted(folder.iterdir()):
            match = _NAME.match(path.name)
            if match:
                self._paths.setdefault(match.group(1), {})[match.group(2)] = path
            elif path.name.endswith(f"-{DUPLICATES_PASS}.txt"):
                self._read_duplicates(path.read_text())

    def texts(self, name: str) -> ScheduleTexts | None:
        """The texts about HLO instruction `name`; None where the compiler wrote none.

        Raises ScheduleFormatError when only some of them are there.
        """
        paths = self._paths.get(name) or self._paths.get(self._first.get(name, name))
        if paths is None:
            return None
        absent = [passed for passed in _PASSES.values() if passed not in paths]
        if absent:
            raise ScheduleFormatError(
                f"the compiler left no {', '.join(absent)} for {name} in {self.folder}: report "
                "the libtpu version; this reader needs an update."
            )
        return ScheduleTexts(
            **{field: paths[passed].read_text() for field, passed in _PASSES.items()}
        )

    def _read_duplicates(self, text: str) -> None:
        """Lines `key:FIRST`, then the equal operations, indented."""
        first = ""
        for line in text.splitlines():
            if line.startswith("key:"):
                first = line.removeprefix("key:").strip()
            elif line.startswith(" "):
                self._first[line.strip()] = first
