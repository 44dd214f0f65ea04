# SPDX-License-Identifier: Apache-2.0
"""The training step and the evaluation step as pure functions of pytrees.

A step is a function of (state, tokens [B, T + 1], learning rate) and of nothing else. Sequence s of
update n draws its dropout masks from fold_in(fold_in(key(dropout_seed), n), s), so masks depend
neither on how the batch is accumulated nor on how it is spread over devices.

Loss and gradients run per device inside shard_map, on that device's sequences: kernels need no
partitioning rules, and each collective is one that this package asks for. The optimiser runs
outside, on global arrays. A step whose loss or gradient norm is not finite changes nothing but the
counters; its data position is used up.

With a document separator the loss is the mean over the targets inside documents (see
`data.segments`) of the whole batch, however it is accumulated and spread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from atomic_lib.data.segments import targets_inside_documents
from atomic_lib.model.gate_statistics import GateStatistics, merge_statistics
from atomic_lib.train.loss import cross_entropy, token_losses
from atomic_lib.train.optimizer import Optimizer, OptimizerState, Params, is_hidden_matrix
from atomic_lib.train.sharding import BATCH_AXES, Placement

# (parameters, tokens [B, T], dropout keys [B] or None) -> hidden states [B, T, D], embedding
# [V, D], statistics of the gates, one entry a GDN-2 mixer (None for a model without)
Forward = Callable[[Params, Array, Array | None], tuple[Array, Array, GateStatistics | None]]
Metrics = dict[str, Any]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "optimizer", "skipped", "skipped_in_a_row", "clipped"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step reads and writes. `step` counts finished steps, skipped ones included."""

    step: Array  # int32
    params: Params
    optimizer: OptimizerState
    skipped: Array  # int32, steps whose loss or gradient was not finite
    skipped_in_a_row: Array  # int32
    clipped: Array  # int32, steps that counted and whose gradient was above the clip


def initial_state(params: Params, optimizer: Optimizer) -> TrainState:
    """The state before the first step."""
    # A zero each, not one for all: the step donates its state, and a buffer can be donated once.
    step, skipped, skipped_in_a_row, clipped = (jnp.zeros((), jnp.int32) for _ in range(4))
    return TrainState(
        step=step,
        params=params,
        optimizer=optimizer.init(params),
        skipped=skipped,
        skipped_in_a_row=skipped_in_a_row,
        clipped=clipped,
    )


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Builds the compiled step of one run.

    `forward` is the model; `accumulate_steps` slices of the batch are computed one after another
    and their gradients averaged; `loss_chunks` as in `cross_entropy`; no dropout_seed, no dropout;
    no document_separator, every target counts.
    `matrix_dtype` is that of hidden matrices in the model (None: their own): they are gathered in
    it, and the sums of their gradients over devices (not those over slices) are formed in it.
    """

    forward: Forward
    optimizer: Optimizer
    placement: Placement
    accumulate_steps: int = 1
    loss_chunks: int = 1
    dropout_seed: int | None = None
    document_separator: int | None = None
    matrix_dtype: str | None = None

    def compiled(self) -> Callable[[TrainState, Array, Array], tuple[TrainState, Metrics]]:
        """The jitted step; it consumes (donates) the state that it is given.

        Metrics are scalars: loss (nats a token), grad_norm (before clipping), finite, clipped
        (this step), clipped_steps, skipped, skipped_in_a_row; and "gates", a `GateStatistics` of
        vectors [GDN-2 mixers] over the whole batch, or None.
        """
        return jax.jit(
            self._step, donate_argnums=0, compiler_options=self.placement.compiler_options
        )

    def _step(
        self, state: TrainState, tokens: Array, learning_rate: Array
    ) -> tuple[TrainState, Metrics]:
        loss, gradients, gates = self.loss_and_gradients(state.params, tokens, state.step)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradients)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            params, optimizer = self.optimizer.update(
                state.params, gradients, state.optimizer, learning_rate, gradient_norm=norm
            )
            params = _choose(finite, params, state.params)
            optimizer = _choose(finite, optimizer, state.optimizer)
        skip = (~finite).astype(jnp.int32)
        clipped = finite & (norm > self.optimizer.clip_norm)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            skipped=state.skipped + skip,
            skipped_in_a_row=(state.skipped_in_a_row + skip) * skip,
            clipped=state.clipped + clipped.astype(jnp.int32),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "finite": finite,
            "clipped": clipped,
            "clipped_steps": new_state.clipped,
            "skipped": new_state.skipped,
            "skipped_in_a_row": new_state.skipped_in_a_row,
            "gates": gates,
        }
        return new_state, metrics

    def loss_and_gradients(
        self, params: Params, tokens: Array, step: Array
    ) -> tuple[Array, Params, GateStatistics | None]:
        """Mean loss over the batch tokens [B, T + 1], its gradient for every parameter, and the
        statistics of the gates."""
        shapes = {name: value.shape for name, value in params.items()}
        specs = {name: self.placement.spec(shape) for name, shape in shapes.items()}
        per_device = partial(self._device_loss_and_gradients, shapes=shapes)
        return jax.shard_map(
            per_device,
            mesh=self.placement.mesh,
            in_specs=(specs, PartitionSpec(BATCH_AXES), PartitionSpec()),
            out_specs=(PartitionSpec(), specs, PartitionSpec()),
            check_vma=False,  # the sums over devices are written out below
        )(params, tokens, step)

    def _device_loss_and_gradients(self, shards, tokens, step, *, shapes):
        """One device's part: the mean over its slices, then the mean over the devices."""
        slices = self.accumulate_steps
        share = 1.0 / (slices * self.placement.devices)
        keys = self._dropout_keys(step, tokens.shape[0])
        weights = self._target_weights(tokens)

        def narrow(shards):
            dtype = self.matrix_dtype
            return {
                name: shard.astype(dtype) if dtype and is_hidden_matrix(name) else shard
                for name, shard in shards.items()
            }

        def loss_of(shards, tokens, keys, weights):
            params = self.placement.gather(shards, shapes)
            hidden, embedding, gates = self.forward(params, tokens[:, :-1], keys)
            with jax.named_scope("loss"):
                loss = cross_entropy(
                    hidden, embedding, tokens[:, 1:], weights=weights, chunks=self.loss_chunks
                )
            return loss * share, gates

        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        if slices == 1:
            (loss, gates), gradients = value_and_grad(narrow(shards), tokens, keys, weights)
        else:
            cut = lambda x: x.reshape(slices, x.shape[0] // slices, *x.shape[1:])  # noqa: E731
            zero = jax.tree.map(jnp.zeros_like, shards)
            add = lambda total, part: jax.tree.map(jnp.add, total, part)  # noqa: E731
            used = narrow(shards)

            def add_slice(total, part):
                (loss, gates), gradients = value_and_grad(used, *part)
                return add(total, (loss, gradients)), gates

            (loss, gradients), gates = jax.lax.scan(
                add_slice,
                (jnp.zeros((), jnp.float32), zero),
                jax.tree.map(cut, (tokens, keys, weights)),
            )
            gates = None if gates is None else merge_statistics(gates)
        loss = jax.lax.psum(loss, BATCH_AXES)
        if gates is not None:
            # One collective of [5, devices, mixers] instead of five.
            gathered = jax.lax.all_gather(jnp.stack(gates), BATCH_AXES, axis=1)
            gates = merge_statistics(GateStatistics(*gathered))
        if self.placement.devices > 1:  # what travels is narrow; on one device nothing does
            gradients = narrow(gradients)
        sums = self.placement.sum_gradients(gradients, shapes)
        return loss, {name: sums[name].astype(shards[name].dtype) for name in sums}, gates

    def _dropout_keys(self, step: Array, local_batch: int) -> Array | None:
        """One key a sequence of this device, [local_batch], by its place in the global batch."""
        if self.dropout_seed is None:
            return None
        key = jax.random.fold_in(jax.random.key(self.dropout_seed), step)
        first = jax.lax.axis_index(BATCH_AXES) * local_batch
        return jax.vmap(lambda i: jax.random.fold_in(key, first + i))(jnp.arange(local_batch))

    def _target_weights(self, tokens: Array) -> Array | None:
        """Weights [B, T] of this device's targets, of mean 1 over the whole batch, or None."""
        if self.document_separator is None:
            return None
        inside = targets_inside_documents(tokens, self.document_separator)
        counted = jax.lax.psum(jnp.sum(inside), BATCH_AXES)
        return inside * (inside.size * self.placement.devices / jnp.maximum(counted, 1))


def _choose(condition: Array, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def make_eval_step(
    forward: Forward,
    placement: Placement,
    chunk_tokens: int,
    document_separator: int | None = None,
) -> Callable[..., dict[str, Array]]:
    """Compiles the sums of one validation batch: (params, tokens [B, T + 1], bytes [V]) -> sums.

    `bytes` int32 [V] is the length of each token's text; 0 marks document separators. The sums are
    nats (of all targets, or with a separator of those inside documents), exact_nats (of those of
    them that have bytes) and position_nats [T] (over the rows), float32, and bytes and
    position_targets [T], int32. Logits exist for `chunk_tokens` of T at one time. A fourth argument
    counts the batch's first rows only; the others are padding.
    """

    def per_device(shards, tokens, token_bytes, counted_rows, *, shapes):
        params = placement.gather(shards, shapes)
        hidden, embedding, _ = forward(params, tokens[:, :-1], None)
        targets = tokens[:, 1:]
        with jax.named_scope("loss"):
            chunks = targets.shape[1] // chunk_tokens
            losses = token_losses(hidden, embedding, targets, chunks=chunks)  # [B, T]
        counted = _counted_targets(tokens, counted_rows, document_separator)
        target_bytes = jnp.where(counted, token_bytes[targets], 0)
        sums = {
            "nats": jnp.sum(jnp.where(counted, losses, 0.0)),
            "exact_nats": jnp.sum(jnp.where(target_bytes > 0, losses, 0.0)),
            "bytes": jnp.sum(target_bytes),
            "position_nats": jnp.sum(jnp.where(counted, losses, 0.0), axis=0),
            "position_targets": jnp.sum(counted, axis=0),
        }
        return jax.lax.psum(sums, BATCH_AXES)

    def sums(params, tokens, token_bytes, counted_rows=None):
        shapes = {name: value.shape for name, value in params.items()}
        specs = {name: placement.spec(shape) for name, shape in shapes.items()}
        return jax.shard_map(
            partial(per_device, shapes=shapes),
            mesh=placement.mesh,
            in_specs=(specs, PartitionSpec(BATCH_AXES), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, tokens, token_bytes, counted_rows)

    return jax.jit(sums, compiler_options=placement.compiler_options)


def _counted_targets(
    tokens: Array, counted_rows: Array | None, document_separator: int | None
) -> Array:
    """Which targets of this device's rows [B, T + 1] an evaluation counts, bool [B, T]."""
    rows = tokens.shape[0]
    counted = jnp.ones((rows, tokens.shape[1] - 1), bool)
    if counted_rows is not None:
        first = jax.lax.axis_index(BATCH_AXES) * rows
        counted &= (first + jnp.arange(rows) < counted_rows)[:, None]
    if document_separator is not None:
        counted &= targets_inside_documents(tokens, document_separator)
    return counted
