# SPDX-License-Identifier: Apache-2.0
"""Before any test imports jax: the CPU, unless an accelerator is here or somebody chose."""

import os

from atomic_lib.environment import accelerator_present

if not accelerator_present():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
