# SPDX-License-Identifier: Apache-2.0
"""Before any test imports jax: the CPU, unless an accelerator is here or somebody chose.

Tests run each program once or twice: with little optimisation of its machine code it compiles in a
third of the time.
"""

import os
from importlib.metadata import version

from atomic_lib.environment import accelerator_present

QUICK_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):  # the quicker code generator; 0.12 has one only
    QUICK_COMPILE.append("--xla_cpu_use_fusion_emitters=false")

if not accelerator_present():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_COMPILE])


def pytest_collection_modifyitems(items):
    """Notebook runs first: the longest of them must not begin when the other processes are done."""
    items.sort(key=lambda item: item.get_closest_marker("notebook") is None)
