# SPDX-License-Identifier: Apache-2.0
"""Before any test imports jax: the CPU, unless an accelerator is here or somebody chose."""

import os

from atomic_lib.environment import accelerator_present

if not accelerator_present():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(items):
    """Notebook runs first: the longest of them must not begin when the other processes are done."""
    items.sort(key=lambda item: item.get_closest_marker("notebook") is None)
