# SPDX-License-Identifier: Apache-2.0
"""Typed, validated parameters of every notebook; without jax, so that the runner can check them."""

from atomic_lib.config.loader import LoadedConfig, load_config, read_parameter_file
from atomic_lib.config.runs import (
    NOTEBOOK_CONFIGS,
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    KernelAuditConfig,
    PreflightConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "NOTEBOOK_CONFIGS",
    "CompareConfig",
    "EvaluateConfig",
    "ExportConfig",
    "KernelAuditConfig",
    "LoadedConfig",
    "PreflightConfig",
    "RunConfig",
    "TrainConfig",
    "load_config",
    "read_parameter_file",
]
