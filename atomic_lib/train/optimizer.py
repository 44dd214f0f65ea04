# SPDX-License-Identifier: Apache-2.0
"""Muon for hidden matrices, AdamW for everything else, behind one clip and one finite check.

For gradients G with global norm n = |G|:

    step counts only if the loss and n are finite; otherwise nothing below happens
    G <- G min(1, clip_norm / n)
    Muon    M <- beta M + (1 - beta) G;  N = Nesterov look-ahead of M with bias correction
            W <- W - lr (0.2 sqrt(max(rows, columns)) NewtonSchulz5(N) + decay W)
    AdamW   W <- W - lr (m / (sqrt(v) + eps) + decay W), bias-corrected m and v, no Nesterov

The factor 0.2 sqrt(max) gives a Muon update the root mean square of a typical Adam update, so that
both groups share one learning rate (Liu et al. 2025, arXiv 2502.16982). Newton-Schulz is that of
`optax.contrib.scale_by_muon`. Parameters are a flat mapping from "/"-joined names to arrays.

Only hidden matrices decay: never the embedding, norm gains, biases, routing queries or taps, unless
`decay_groups` asks for it. Which parameter is in which group is decided by its name, in
`atomic_lib.model.accounting`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from optax import contrib

from atomic_lib.model.accounting import parameter_group
from atomic_lib.train.sharding import Placement

Params = dict[str, Array]
OptimizerState = dict[str, dict[str, Any]]

MUON_MOMENTUM = 0.95
# The quintic of Jordan et al. (2024), five times. Given one by one, optax loops over them, and the
# compiler meets 3 matrix products a shape instead of 15.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
UPDATE_RMS = 0.2  # of a typical AdamW update, arXiv 2502.16982 section 2.2
# Matrices of one shape that go through Newton-Schulz in one batched product on one device. By
# compiled cycle estimates for TPU v5e a 1024 x 1024 matrix costs 0.23 ms alone, 0.19 ms in a batch
# of 14, and 0.40 ms in one of 147, which no longer fits in VMEM.
STACK_SIZE = 14


GROUP_LABELS = {
    "muon": "hidden matrices",
    "adamw_matrices": "convolution taps",
    "embedding": "input and output tables",
    "vectors": "gains, biases, routing queries, decay rates",
}


def is_hidden_matrix(name: str) -> bool:
    """Whether Muon may have a parameter: a matrix between the embedding and the logits."""
    return parameter_group(name) == "muon"


def _stack_plan(params: Mapping[str, Any], devices: int) -> dict[str, list[str]]:
    """Names that share one stack, by stack key; stacks hold equal shapes."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(params):
        by_shape.setdefault(params[name].shape, []).append(name)
    size = STACK_SIZE * devices
    return {
        f"{shape[0]}x{shape[1]}-{start // size}": names[start : start + size]
        for shape, names in by_shape.items()
        for start in range(0, len(names), size)
    }


@dataclass(frozen=True, kw_only=True)
class Muon:
    """The Muon direction of hidden matrices: momentum, Newton-Schulz, matched root mean square.

    Momentum lies where its parameter lies. For Newton-Schulz, matrices of one shape are stacked and
    each device of `placement` gets whole matrices of its own, in `exchange_dtype` (None: their own)
    on the way there and back. placement None is one device.
    """

    placement: Placement | None = None
    exchange_dtype: jnp.dtype | None = None

    def init(self, params: Params) -> dict[str, Any]:
        """Zero momentum, one entry a parameter."""
        return {
            "count": jnp.zeros((), jnp.int32),
            "momentum": {name: jnp.zeros_like(value) for name, value in params.items()},
        }

    def direction(self, gradients: Params, state: dict[str, Any]) -> tuple[Params, dict[str, Any]]:
        """Returns the ascent direction (to be scaled by -lr) and the new state."""
        beta, count = MUON_MOMENTUM, state["count"] + 1
        momentum, ahead = {}, {}
        for name, gradient in gradients.items():
            momentum[name] = beta * state["momentum"][name] + (1 - beta) * gradient
            # Bias correction of each term for its own age.
            ahead[name] = (
                beta / (1 - beta ** (count + 1)) * momentum[name]
                + (1 - beta) / (1 - beta**count) * gradient
            )
        devices = self.placement.devices if self.placement else 1
        directions: Params = {}
        for names in _stack_plan(ahead, devices).values():
            directions |= self._orthogonalise({name: ahead[name] for name in names})
        return directions, {"count": count, "momentum": momentum}

    def _orthogonalise(self, matrices: Params) -> Params:
        """0.2 sqrt(max) times Newton-Schulz of a few matrices of one shape."""
        shape, dtype = next((value.shape, value.dtype) for value in matrices.values())
        stack = jnp.stack([*matrices.values()])  # [n, rows, columns]
        if self.placement is not None and self.placement.devices > 1:
            # Zero matrices stay zero in Newton-Schulz; they fill the last device's share.
            stack = jnp.pad(stack, ((0, -len(matrices) % self.placement.devices), (0, 0), (0, 0)))
        stack = self._move(stack, by_matrix=True).astype(dtype)
        axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)  # axis 0 is a batch
        transform = contrib.scale_by_muon(
            ns_coeffs=NEWTON_SCHULZ, beta=0.0, nesterov=False, weight_dimension_numbers=axes
        )
        stack, _ = transform.update(stack, transform.init(stack))
        stack = UPDATE_RMS * math.sqrt(max(shape)) * self._move(stack, by_matrix=False)
        return {name: stack[index].astype(dtype) for index, name in enumerate(matrices)}

    def _move(self, stack: Array, *, by_matrix: bool) -> Array:
        """Spreads a stack over the devices by whole matrices, or as its parameters lie."""
        if self.placement is None or self.placement.devices == 1:
            return stack
        mesh, rows = self.placement.mesh, self.placement.spec(stack.shape[1:])
        apart = PartitionSpec(None, *rows)
        before, after = (apart, self.placement.batch.spec) if by_matrix else (
            self.placement.batch.spec, apart
        )  # fmt: skip
        # Both ends are pinned in the exchange dtype, so that what travels is no wider.
        stack = stack.astype(self.exchange_dtype or stack.dtype)
        stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, before))
        return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, after))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Updates parameters from gradients; `kind` says what the hidden matrices get.

    The learning rate is an argument of `update`, so that it can change without a recompilation.
    """

    kind: Literal["muon_adamw", "adamw"]
    weight_decay: float
    clip_norm: float
    decay_groups: tuple[str, ...] = ("muon",)  # of `atomic_lib.model.accounting.GROUPS`
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    placement: Placement | None = None  # see `Muon`
    exchange_dtype: jnp.dtype | None = None

    def _split(self, params: Mapping[str, Array]) -> tuple[Params, Params]:
        """Muon's parameters and Adam's."""
        hidden = self.kind == "muon_adamw"
        muon = {name: p for name, p in params.items() if hidden and is_hidden_matrix(name)}
        return muon, {name: p for name, p in params.items() if name not in muon}

    def decay_of(self, name: str) -> float:
        """The weight decay of a parameter."""
        return self.weight_decay if parameter_group(name) in self.decay_groups else 0.0

    def _adam(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(b1=self.adam_b1, b2=self.adam_b2, eps=self.adam_eps)

    def init(self, params: Params) -> OptimizerState:
        """State for `params`: {"adam": {count, mu, nu}} and, for Muon, {"muon": {count, momentum}}.

        Moments have the dtype of their parameter.
        """
        muon, adam = self._split(params)
        start = self._adam().init(adam)
        state: OptimizerState = {"adam": {"count": start.count, "mu": start.mu, "nu": start.nu}}
        if muon:
            state["muon"] = Muon().init(muon)
        return state

    def update(
        self,
        params: Params,
        gradients: Params,
        state: OptimizerState,
        learning_rate: Array,
        *,
        gradient_norm: Array,
    ) -> tuple[Params, OptimizerState]:
        """One step without finite check: clip, direction, decay, scale, subtract.

        `gradients` has the names and shapes of `params`, and `gradient_norm` is their global norm;
        `learning_rate` is a scalar array.
        """
        tiny = jnp.finfo(gradient_norm.dtype).tiny
        scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(gradient_norm, tiny))
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
        muon_gradients, adam_gradients = self._split(gradients)
        start = optax.ScaleByAdamState(**state["adam"])
        directions, end = self._adam().update(adam_gradients, start)
        new_state: OptimizerState = {"adam": {"count": end.count, "mu": end.mu, "nu": end.nu}}
        if muon_gradients:
            muon = Muon(placement=self.placement, exchange_dtype=self.exchange_dtype)
            muon_directions, new_state["muon"] = muon.direction(muon_gradients, state["muon"])
            directions = {**directions, **muon_directions}
        return self._apply(params, directions, learning_rate), new_state

    def _apply(self, params: Params, directions: Params, learning_rate: Array) -> Params:
        updated = {}
        for name, value in params.items():
            decay = self.decay_of(name)
            step = directions[name] + decay * value if decay else directions[name]
            updated[name] = (value - learning_rate * step).astype(value.dtype)
        return updated


def describe_groups(params: Mapping[str, Any], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Rows of a table: which update each group of parameters gets, its size and its decay."""
    rows = []
    for group, label in GROUP_LABELS.items():
        names = [name for name in params if parameter_group(name) == group]
        if names:
            muon = group == "muon" and optimizer.kind == "muon_adamw"
            rows.append(
                {
                    "group": group,
                    "what": label,
                    "update": "Muon" if muon else "AdamW",
                    "tensors": len(names),
                    "parameters": sum(math.prod(params[name].shape) for name in names),
                    "weight_decay": optimizer.decay_of(names[0]),
                }
            )
    return rows
