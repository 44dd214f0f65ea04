# SPDX-License-Identifier: Apache-2.0
"""One composable language model in Flax NNX: its configuration, its modules, its parameters.

`config`, `accounting`, `depth` and `execution` are free of JAX; the other modules are not, so the
names below are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atomic_lib.model.config import ModelConfig
    from atomic_lib.model.execution import Execution
    from atomic_lib.model.language_model import LanguageModel
    from atomic_lib.model.parameters import (
        abstract_parameters,
        named_parameters,
        parameter_groups,
        restore_parameters,
    )

_HOMES = {
    "ModelConfig": "config",
    "Execution": "execution",
    "LanguageModel": "language_model",
    "abstract_parameters": "parameters",
    "named_parameters": "parameters",
    "parameter_groups": "parameters",
    "restore_parameters": "parameters",
}

__all__ = [
    "Execution",
    "LanguageModel",
    "ModelConfig",
    "abstract_parameters",
    "named_parameters",
    "parameter_groups",
    "restore_parameters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
