# SPDX-License-Identifier: Apache-2.0
"""The child process of `compile_schedule`: compiles one function for a TPU topology.

libtpu reads its dump options once, when it loads, and holds a lock while it is loaded; so the
compile has a process of its own. Run as `python -m atomic_kernels.schedule.worker REQUEST RESULT`,
both JSON files; the environment is set by the parent before this process imports jax.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def load_factory(target: str):
    """The callable that `target` names: "package.module:name" or "path/to/file.py:name".

    Raises ValueError when the form is wrong or the name is absent; an import error passes on.
    """
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise ValueError(
            f"target: {target!r} is not MODULE:FUNCTION or FILE.py:FUNCTION: "
            'write for example "my_package.kernels:forward_case".'
        )
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise ValueError(f"target: no Python file at {source!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    if not hasattr(module, name):
        raise ValueError(f"target: {source} has no attribute {name!r}")
    return getattr(module, name)


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the request's function and returns HLO text, memory and versions, JSON-ready."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices: list[Any] = list(topologies.get_topology_desc(request["topology"], "tpu").devices)
    mesh = Mesh(np.array(devices[: request["devices"]]), ("devices",))
    factory = load_factory(request["target"])
    keywords = dict(request["arguments"])
    if "mesh" in inspect.signature(factory).parameters:
        keywords["mesh"] = mesh
    function, arguments = factory(**keywords)
    replicated = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or replicated
        ),
        tuple(arguments),
    )
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    started = time.monotonic()
    compiled = jitted.lower(*arguments).compile()
    seconds = time.monotonic() - started
    return {
        "hlo": compiled.as_text(),
        "memory": _memory(compiled.memory_analysis()),
        "compile_seconds": seconds,
        "device_kind": devices[0].device_kind,
        "jax_version": jax.__version__,
        "libtpu_version": importlib.metadata.version("libtpu"),
    }


def _memory(stats: Any) -> dict[str, int]:
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {f"{name}_bytes": int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def end_with_parent(parent: int, *, every_seconds: float = 2.0) -> None:
    """Ends this process soon after its parent is gone: nobody reads a compile of minutes then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(request_path: str, result_path: str) -> int:
    """Writes the result, or the error with its kind and traceback, to `result_path`."""
    end_with_parent(os.getppid())
    request = json.loads(Path(request_path).read_text())
    try:
        result = compile_request(request)
    # Whatever the caller's function or the compiler raises belongs in the parent's error.
    except Exception as error:
        result = {
            "error_kind": type(error).__name__,
            "error": str(error),
            "traceback": traceback.format_exc(),
        }
    Path(result_path).write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
