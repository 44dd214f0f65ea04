# SPDX-License-Identifier: Apache-2.0
"""The language model: embedding, blocks of mixers and feed-forward layers, final norm, logits."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atomic_lib.model.config import ModelConfig
from atomic_lib.model.context import (
    TokenContext,
    advance,
    make_context,
    move_real_tokens_first,
)
from atomic_lib.model.depth import Source
from atomic_lib.model.execution import DEFAULT_EXECUTION, Execution
from atomic_lib.model.feed_forward import FeedForward
from atomic_lib.model.gate_statistics import GateStatistics, stack_statistics
from atomic_lib.model.initialise import initial_values
from atomic_lib.model.layers import Norm, norm
from atomic_lib.model.mixers import MIXER_CLASSES
from atomic_lib.model.names import nest_names
from atomic_lib.model.routing import DepthLedger, DepthRoute, block_summary
from atomic_lib.model.routing_tpu import TpuDepthLedger

Array = jax.Array


class ModelState(NamedTuple):
    """Everything a row needs to go on: nothing else is kept between calls.

    position [B] int32: tokens seen; segment_start [B] int32: position where the row's current
    segment began; mixers: the state of each mixer by its path, e.g. "block_0/mixer_2".
    """

    position: Array
    segment_start: Array
    mixers: dict[str, Any]


class Dropout(NamedTuple):
    """rate in [0, 1); one key a row [B], or None for no dropout."""

    rate: float
    keys: Array | None

    def of_sublayer(self, index: int) -> "Dropout":
        """The same rate with keys of its own."""
        if self.keys is None or self.rate == 0:
            return Dropout(0.0, None)
        return Dropout(self.rate, jax.vmap(jax.random.fold_in, (0, None))(self.keys, index))


class Table(nnx.Module):
    """Vectors of the vocabulary, `table` [V, D] float32."""

    def __init__(self, config: ModelConfig):
        shape = (config.vocab_size, config.hidden_size)
        self.table = nnx.Param(jnp.zeros(shape, jnp.float32))


class Block(nnx.Module):
    """One block: per sublayer NAME of `config.sublayers` the modules

    NAME (the mixer or feed-forward layer), NAME_norm, NAME_post_norm (family "R") and NAME_route
    (where the depth plan gives the site sources).
    """

    def __init__(self, config: ModelConfig, index: int, execution: Execution):
        self.replaces = config.routing_read == "replacement"
        for name, sources in zip(config.sublayers, config.depth_plan.reads[index], strict=True):
            mixer = config.mixer_of(name)
            kind: Any = FeedForward if mixer is None else MIXER_CLASSES[mixer]
            setattr(self, name, kind(config, execution))
            setattr(self, f"{name}_norm", norm(config, execution))
            if config.norm_family == "R":
                setattr(self, f"{name}_post_norm", norm(config, execution))
            if sources:
                setattr(self, f"{name}_route", DepthRoute(config.hidden_size))

    def sublayer(
        self, name: str, x: Array, delta: Array | None, read: Array | None, context: TokenContext,
        state: Any, dropout: Dropout,
    ) -> tuple[Array, Array, Any, GateStatistics | None]:  # fmt: skip
        """Returns (residual stream, its next delta, new state, gate statistics).

        x, delta, read and both results [B, T, D]: the stream is x + delta, where delta is what the
        sublayer before this one gave (None before the first).
        """
        x, normal = self._normalised(getattr(self, f"{name}_norm"), x, delta, read)
        module = getattr(self, name)
        if isinstance(module, FeedForward):
            y = module(normal, dropout_rate=dropout.rate, dropout_keys=dropout.keys)
            state, statistics = None, None
        else:
            y, state, statistics = module(normal, context, state)
        post_norm = getattr(self, f"{name}_post_norm", None)
        return x, (y if post_norm is None else post_norm(y)), state, statistics

    def _normalised(
        self, norm: Norm, x: Array, delta: Array | None, read: Array | None
    ) -> tuple[Array, Array]:
        """The residual stream, and the normalised input of the sublayer that reads it."""
        if delta is not None and not self.replaces:
            return norm.after_sum(x, delta, read)
        stream = x if delta is None else x + delta
        if read is None:
            return stream, norm(stream)
        return stream, norm(read if self.replaces else stream + read)


_REMAT_POLICIES = {
    "save_dots": jax.checkpoint_policies.dots_saveable,
    "save_nothing": jax.checkpoint_policies.nothing_saveable,
}


def _refuse_bad_dropout(rate: float, keys: Array | None, batch_size: int) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate: {rate} is not allowed; it must be in [0, 1)")
    if keys is not None and keys.shape[:1] != (batch_size,):
        raise ValueError(
            f"dropout_keys: expected one key a row, ({batch_size},), got {keys.shape}; "
            "make them with jax.random.split"
        )


class LanguageModel(nnx.Module):
    """h = blocks(embedding(tokens)), hidden = final_norm(h), logits = hidden E^T.

    E is the input table if `tied_embedding`, else a table of its own. Parameter paths are the names
    of an export: "embedding/table", "block_0/mixer_2/q/kernel", "final_norm/scale"; dense kernels
    are [in, out], tables [V, D], all float32. `config.parameter_shapes` lists them.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, execution: Execution = DEFAULT_EXECUTION
    ):
        self.config = config
        self.execution = execution
        self.embedding = Table(config)
        if config.norm_family == "R":
            self.embedding_norm = norm(config, execution)
        for index in range(config.num_blocks):
            setattr(self, f"block_{index}", Block(config, index, execution))
        self.final_norm = norm(config, execution)
        if not config.tied_embedding:
            self.unembedding = Table(config)
        nnx.update(self, nest_names(initial_values(config, rngs.params())))

    def __call__(
        self,
        tokens: Array,
        *,
        segment_ids: Array | None = None,
        mask: Array | None = None,
        state: ModelState | None = None,
        dropout_keys: Array | None = None,
        dropout_rate: float = 0.0,
    ) -> tuple[Array, ModelState | None]:
        """Returns (hidden [B, T, D] after the final norm, in the compute dtype; new state).

        tokens [B, T] int32 in [0, vocab_size); one outside gives NaN in its row. segment_ids
        [B, T] int32, non-decreasing: a token sees its own segment only. mask [B, T] bool: False is
        padding, which changes no state and no other token (its own hidden is finite and means
        nothing). state: of `initial_state` or of an earlier call, which this one continues; None
        starts new rows and returns None. dropout_keys [B], one a row, drop feed-forward activations
        at `dropout_rate`. Raises ValueError for an argument of another shape or kind.
        """
        hidden, new_state, _ = self.observed(
            tokens,
            segment_ids=segment_ids,
            mask=mask,
            state=state,
            dropout_keys=dropout_keys,
            dropout_rate=dropout_rate,
        )
        return hidden, new_state

    def observed(
        self,
        tokens: Array,
        *,
        segment_ids: Array | None = None,
        mask: Array | None = None,
        state: ModelState | None = None,
        dropout_keys: Array | None = None,
        dropout_rate: float = 0.0,
    ) -> tuple[Array, ModelState | None, GateStatistics | None]:
        """As a call of the model, and the statistics of each mixer's gates, in order of depth.

        None for a model without GDN-2 mixers; `ModelConfig.gated_mixers` names them.
        """
        self._refuse_bad_input(tokens, segment_ids, mask)
        _refuse_bad_dropout(dropout_rate, dropout_keys, tokens.shape[0])
        placement = None
        if mask is not None:
            placement = move_real_tokens_first(tokens, segment_ids, mask)
            tokens, segment_ids = placement.tokens, placement.segment_ids
        start = None if state is None else (state.position, state.segment_start)
        context = make_context(
            tokens.shape, segment_ids=segment_ids, placement=placement, start=start
        )
        hidden, mixers, statistics = self._run_blocks(
            self._embed(tokens), context, None if state is None else state.mixers,
            Dropout(dropout_rate, dropout_keys),
        )  # fmt: skip
        if placement is not None:
            hidden = jnp.take_along_axis(hidden, placement.back[:, :, None], axis=1)
        if start is None:
            return hidden, None, statistics
        return hidden, ModelState(*advance(start, context), mixers), statistics

    def _refuse_bad_input(self, tokens, segment_ids, mask) -> None:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens: expected integers [B, T], got {tokens.dtype} {tokens.shape}; "
                "add a batch axis to a single row"
            )
        for name, value, kind in (
            ("segment_ids", segment_ids, jnp.integer), ("mask", mask, jnp.bool_)
        ):  # fmt: skip
            if value is None:
                continue
            if value.shape != tokens.shape or not jnp.issubdtype(value.dtype, kind):
                raise ValueError(
                    f"{name}: expected {kind.__name__} {tokens.shape} like tokens, "
                    f"got {value.dtype} {value.shape}"
                )

    def _embed(self, tokens: Array) -> Array:
        """[B, T] -> [B, T, D] in the compute dtype."""
        x = jnp.take(self.embedding.table[...], tokens, axis=0, mode="fill")
        x = x.astype(self.execution.compute_dtype)
        return self.embedding_norm(x) if self.config.norm_family == "R" else x

    def _run_blocks(
        self, x: Array, context: TokenContext, states: dict[str, Any] | None, dropout: Dropout
    ) -> tuple[Array, dict[str, Any], GateStatistics | None]:
        """Returns the final norm of the residual stream, the mixers' new states, their gates."""
        ledger = self._open_ledger()
        delta: Any = None  # what the last sublayer gave, not yet in x
        statistics: list[GateStatistics] = []
        new_states: dict[str, Any] = {}
        for index in range(self.config.num_blocks):
            block = getattr(self, f"block_{index}")
            summary_is_read = bool(self.config.depth_plan.consumers(Source(index)))
            summarised: list[Array] = []
            for slot, name in enumerate(self.config.sublayers):
                path = f"block_{index}/{name}"
                x, delta, new_state, gates = self._step(
                    partial(block.sublayer, name), x, delta, ledger.read((index, slot)), context,
                    None if states is None else states.get(path),
                    dropout.of_sublayer(index * len(self.config.sublayers) + slot),
                )  # fmt: skip
                if gates is not None:
                    statistics.append(gates)
                if new_state is not None:
                    new_states[path] = new_state
                joins_summary = summary_is_read and (
                    self.config.routing_summary_ffn or name.startswith("mixer")
                )
                delta, *more = ledger.add(Source(index, slot), delta, other_uses=1 + joins_summary)
                summarised += more
            if summary_is_read:
                ledger.add(Source(index), block_summary(summarised), other_uses=0)
        _, hidden = self.final_norm.after_sum(x, delta, None)
        return hidden, new_states, stack_statistics(statistics)

    def _step(self, sublayer, x, delta, read, context, state, dropout):
        """Runs one sublayer under the execution's rule for what the backward pass keeps."""
        policy = _REMAT_POLICIES.get(self.execution.remat)
        if policy is None:
            return sublayer(x, delta, read, context, state, dropout)

        # The rate is a Python number that decides what is traced, so it stays outside.
        def run(x, delta, read, state, keys):
            return sublayer(x, delta, read, context, state, Dropout(dropout.rate, keys))

        return jax.checkpoint(run, policy=policy)(x, delta, read, state, dropout.keys)

    def _open_ledger(self) -> DepthLedger | TpuDepthLedger:
        plan = self.config.depth_plan
        weights = {
            (index, slot): getattr(getattr(self, f"block_{index}"), f"{name}_route").weights()
            for index in range(self.config.num_blocks)
            for slot, name in enumerate(self.config.sublayers)
            if plan.reads[index][slot]
        }
        kind = TpuDepthLedger if self.execution.depth_routing == "tpu" else DepthLedger
        return kind(plan, weights, epsilon=self.config.norm_epsilon)

    def initial_state(self, batch_size: int, *, max_length: int) -> ModelState:
        """Returns the state of `batch_size` new rows of at most `max_length` tokens.

        Only attention caches grow with `max_length`. Tokens beyond it would not be remembered, so
        the caller must not go further.
        """
        zeros = jnp.zeros((batch_size,), jnp.int32)
        mixers = {
            f"block_{index}/{name}": getattr(getattr(self, f"block_{index}"), name).initial_state(
                batch_size, max_length
            )
            for index in range(self.config.num_blocks)
            for name in self.config.sublayers
            if self.config.mixer_of(name) is not None
        }
        return ModelState(zeros, zeros, mixers)

    def output_embedding(self) -> Array:
        """Returns E [V, D] float32, the rows that hidden vectors are compared with."""
        owner = self.embedding if self.config.tied_embedding else self.unembedding
        return owner.table[...]

    def logits(self, hidden: Array) -> Array:
        """hidden [..., D] -> float32 logits [..., V]; the operands have hidden's dtype.

        For a loss over many tokens, do not hold this tensor: use `output_embedding` in slices.
        """
        table = self.output_embedding().astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
