# SPDX-License-Identifier: Apache-2.0
"""Training that can be interrupted anywhere, resumed exactly, and proven afterwards.

session       `train`: begins or resumes a run and says how it ended
loop          one session, step by step; `interrupts`: its signals; `budget`: its clock
record        metrics.jsonl; `heartbeat`: printed lines; `trackers`, `profiling`: views for watching
checkpoint    checkpoints that are whole or do not count; `earlier`: those of other folders
replay        repeats a recorded run and audits it; `result`: what comes back
program       everything that is compiled; `step`: train and eval step; `loss`; `optimizer`
schedule      learning rate by progress; `evaluation`: bits per byte; `sharding`: the mesh
"""

from atomic_lib.train.checkpoint import ConfigMismatchError
from atomic_lib.train.interrupts import TrainingInterrupted
from atomic_lib.train.loop import NonFiniteError
from atomic_lib.train.result import TrainResult, require_improvement
from atomic_lib.train.session import train

__all__ = [
    "ConfigMismatchError",
    "NonFiniteError",
    "TrainResult",
    "TrainingInterrupted",
    "require_improvement",
    "train",
]
