# SPDX-License-Identifier: Apache-2.0
"""The token mixers, one a file.

Each has `__init__(config, execution)`, `__call__(x, context, state) -> (y, state, statistics)` and
`initial_state(batch_size, max_length)`. x and y are [B, T, D]; where `state` is None the mixer
starts a new row and returns None. `statistics` are those of its gates (`GateStatistics`), or None
if it has none.
"""

from functools import partial

from atomic_lib.model.mixers.attention import Attention
from atomic_lib.model.mixers.gdn2 import GDN2
from atomic_lib.model.mixers.gdn2_conv import GDN2Conv
from atomic_lib.model.mixers.mla import MLA

MIXER_CLASSES = {
    "gdn2": GDN2,
    "gdn2_conv": GDN2Conv,
    "mla": MLA,
    "attention": partial(Attention, windowed=False),
    "window_attention": partial(Attention, windowed=True),
}
