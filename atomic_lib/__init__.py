# SPDX-License-Identifier: Apache-2.0
"""Trains, exports, evaluates, compares and proves Gated DeltaNet-2 language models.

The notebooks are the interface; this package holds what their cells call. One sub-package each:

    evidence    run folders, the hash-chained metrics log, `python -m atomic_lib.evidence verify`
    config      typed run parameters and the loader of parameter files
    presets     the named models, as data; model holds what they are made of
    data        token files on disk and the batches drawn from them
    train       loss, optimiser, schedule, step, checkpoints and the loop
    export, evaluate, compare      what happens to a trained model
    environment    what a session needs before jax is imported
    hosts       runs of many processes: `python -m atomic_lib.hosts train/<run>`
    kaggle      what Kaggle's own command uploads
    notebook    tables and figures for the cells; run starts a notebook without a browser

A repository's own kernels are used without being installed. Nothing else happens here, so that
`import atomic_lib.config` stays free of JAX.
"""

import sys
from pathlib import Path

_KERNELS = Path(__file__).resolve().parents[1] / "kernels"
if _KERNELS.is_dir() and str(_KERNELS) not in sys.path:
    sys.path.insert(0, str(_KERNELS))
