# SPDX-License-Identifier: Apache-2.0
"""The evidence of one run as a zip file that verifies anywhere."""

import json
import os
import zipfile
from pathlib import Path

from atomic_lib.evidence.files import sync_folder
from atomic_lib.evidence.verify import SUCCESS, SUMS, verify

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format: the same run, the same bytes
STORED_SUFFIXES = (".png", ".safetensors", ".gz", ".zst")  # deflate gains nothing on these


def zip_run(path: Path) -> Path:
    """Writes outputs/<run_id>.zip beside the run folder and returns its path.

    It holds what SUCCESS.json lists, SUCCESS.json and SHA256SUMS, so no checkpoints; `python
    verify.py` in the folder where it is unpacked checks it. The same run gives the same bytes.
    Raises ValueError with the problems if the run is not verified.
    """
    path = Path(path).resolve()
    problems = verify(path)
    if problems:
        raise ValueError(f"{path} is not verified, so it is not zipped: " + "; ".join(problems))
    files = json.loads((path / SUCCESS).read_text(encoding="utf-8"))["files"]
    target = path.with_name(path.name + ".zip")
    temporary = target.with_name(f".{target.name}.tmp")
    with zipfile.ZipFile(temporary, "w") as archive:
        for name in sorted([*files, SUCCESS, SUMS]):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3  # Unix, whatever system writes it
            stored = name.endswith(STORED_SUFFIXES)
            entry.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            with (
                open(path / name, "rb") as source,
                archive.open(entry, "w", force_zip64=True) as out,
            ):
                while piece := source.read(1 << 20):
                    out.write(piece)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, target)
    sync_folder(target.parent)
    return target
