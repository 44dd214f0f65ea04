# SPDX-License-Identifier: Apache-2.0
"""What is checked before a run spends its budget.

runtime     this machine, the data and the kernels
compiled    the training step as compiled for this machine
ahead       the steps as compiled for a TPU slice that is not here
measured    that prediction beside what a training run measured
"""

from atomic_lib.preflight.ahead import compile_ahead_of_time
from atomic_lib.preflight.compiled import compile_training_step
from atomic_lib.preflight.measured import predicted_and_measured, prediction_rows
from atomic_lib.preflight.runtime import Check, check_runtime

__all__ = [
    "Check",
    "check_runtime",
    "compile_ahead_of_time",
    "compile_training_step",
    "predicted_and_measured",
    "prediction_rows",
]
