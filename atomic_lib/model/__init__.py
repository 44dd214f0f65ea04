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
    from atomic_lib.model.language_model import LanguageModel, ModelState
    from atomic_lib.model.parameters import (
        abstract_parameters,
        bind_parameters,
        init_parameters,
        model_graph,
        named_parameters,
        parameter_groups,
    )

__all__ = [
    "Execution",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "abstract_parameters",
    "bind_parameters",
    "init_parameters",
    "model_graph",
    "named_parameters",
    "parameter_groups",
]

_HOMES = {
    "ModelConfig": "config",
    "Execution": "execution",
    "LanguageModel": "language_model",
    "ModelState": "language_model",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'parameters')}"), name)
