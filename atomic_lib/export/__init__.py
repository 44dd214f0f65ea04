# SPDX-License-Identifier: Apache-2.0
"""Trained models as safetensors folders that are checked whenever they are read."""

from atomic_lib.export.layout import ExportedModel, read_export, write_export
from atomic_lib.export.runs import export, load_export, restore_parameters

__all__ = [
    "ExportedModel",
    "export",
    "load_export",
    "read_export",
    "restore_parameters",
    "write_export",
]
