# SPDX-License-Identifier: Apache-2.0
"""What is checked before a run spends its budget.

runtime     this machine, the data and the kernels
compiled    the training step as compiled for this machine
"""

from atomic_lib.preflight.compiled import compile_training_step
from atomic_lib.preflight.runtime import Check, check_runtime

__all__ = ["Check", "check_runtime", "compile_training_step"]
