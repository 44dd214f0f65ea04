# SPDX-License-Identifier: Apache-2.0
"""A model's parameters as a flat mapping from "/"-joined names to float32 arrays.

This is the form that optimiser, checkpoint and export use; `bind_parameters` makes it a model again
inside a traced function:

    graph = model_graph(config, execution)
    def forward(params, tokens):
        model = bind_parameters(graph, params)
        hidden, _ = model(tokens)
        return hidden, model.output_embedding()
"""

from collections.abc import Iterable, Mapping
from typing import cast

import jax
from flax import nnx

from atomic_lib.model.accounting import parameter_group
from atomic_lib.model.config import ModelConfig
from atomic_lib.model.execution import Execution
from atomic_lib.model.initialise import initial_values
from atomic_lib.model.language_model import LanguageModel
from atomic_lib.model.names import flatten_names, nest_names

Array = jax.Array


def named_parameters(model: LanguageModel) -> dict[str, Array]:
    """Returns the model's parameters by name, sorted by name."""
    return flatten_names(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def parameter_groups(names: Iterable[str]) -> dict[str, str]:
    """Returns the group ("embedding", "muon", "adamw_matrices" or "vectors") of each name."""
    return {name: parameter_group(name) for name in names}


def abstract_parameters(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the model's parameters by name; allocates nothing."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    return cast(dict[str, jax.ShapeDtypeStruct], named_parameters(model))


def init_parameters(config: ModelConfig, seed: int) -> dict[str, Array]:
    """Returns the parameters that a run with this seed starts from; see `initialise.py`."""
    return initial_values(config, nnx.Rngs(seed).params())


def model_graph(config: ModelConfig, execution: Execution) -> nnx.GraphDef:
    """Returns the model without its parameters; allocates nothing."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0), execution=execution))
    graph, _ = nnx.split(model)
    return graph


def bind_parameters(graph: nnx.GraphDef, params: Mapping[str, Array]) -> LanguageModel:
    """Returns the model that `params` make with `graph`; arrays may be tracers."""
    return nnx.merge(graph, nest_names(params))
