# SPDX-License-Identifier: Apache-2.0
"""Programs for the TPU compile tests; factories for `compile_schedule`."""

import jax
import jax.numpy as jnp
from atomic_kernels.gdn2 import gdn2_from_projections


def layer_training(*, T: int, H: int = 2, K: int = 128, width: int = 256):
    """Gradients of a GDN-2 layer's weights and input: six projections of x [1, T, width]."""

    def loss(x, weights, A_log, dt_bias):
        projections = [(x @ weight).reshape(1, T, H, K) for weight in weights]
        o, _ = gdn2_from_projections(*projections, A_log=A_log, dt_bias=dt_bias, backend="tpu")
        return o.astype(jnp.float32).mean()

    weights = [jax.ShapeDtypeStruct((width, H * K), jnp.bfloat16)] * 6
    arguments = (
        jax.ShapeDtypeStruct((1, T, width), jnp.bfloat16),
        weights,
        jax.ShapeDtypeStruct((H,), jnp.float32),
        jax.ShapeDtypeStruct((H, K), jnp.float32),
    )
    return jax.grad(loss, argnums=(0, 1, 2, 3)), arguments
