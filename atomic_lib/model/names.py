# SPDX-License-Identifier: Apache-2.0
"""Between "/"-joined names and nested dictionaries. Free of JAX."""

from collections.abc import Mapping
from typing import Any


def flatten_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"a/b/c": leaf} of nested mappings, sorted by name."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": leaf for inner, leaf in flatten_names(value).items()}
        else:
            flat[name] = value
    return {name: flat[name] for name in sorted(flat)}


def nest_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dictionaries of {"a/b/c": leaf}; the inverse of `flatten_names`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *owners, leaf = path.split("/")
        node = tree
        for owner in owners:
            node = node.setdefault(owner, {})
        node[leaf] = value
    return tree
