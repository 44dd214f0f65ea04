# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks without a browser: `python -m atomic_lib.run params/train_hybrid/smoke.yaml`.

    jobs        from parameter files to the notebooks and run folders that they mean
    kernel      the child process that executes a notebook, its environment and its signals
    watch       where a running notebook is, read from outside
    display     a live display on a terminal, plain lines elsewhere
    outcome     report, seal, verify; or FAILED.json

No jax in this process, ever: a TPU belongs to one process, and that is the notebook's kernel.
papermill's exit code proves nothing, so a run counts only if its sealed folder verifies.
"""
