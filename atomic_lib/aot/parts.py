# SPDX-License-Identifier: Apache-2.0
"""Which part of a training step an instruction belongs to, read from its metadata.

The model and the step name their parts with `jax.named_scope`; jax keeps those names, through
differentiation, in each instruction's op_name:

    jit(_step)/shard_map/transpose(jvp(block_0))/mixer_1/gdn2_kernel/pallas_call

The innermost name that the table knows decides. A fusion has one op_name, that of its root, so what
XLA fuses into another part's operation is counted there.
"""

import re

GDN2, MATRICES, ATTENTION = "GDN-2 kernels", "matrix products", "attention"
ROUTING = "depth routing"
LOSS, OPTIMISER, COLLECTIVES, OTHER = "loss", "optimiser", "collectives", "other"
PARTS = (GDN2, MATRICES, ATTENTION, ROUTING, LOSS, OPTIMISER, COLLECTIVES, OTHER)

SCOPE_PARTS = {
    "gdn2_kernel": GDN2,
    "attention_kernel": ATTENTION,
    "depth_routing": ROUTING,
    "loss": LOSS,
    "optimizer": OPTIMISER,
}
_WORD = re.compile(r"[A-Za-z_][\w]*")


def part_of(op_name: str, *, is_matrix_product: bool, is_collective: bool) -> str:
    """Returns the part of an instruction; `op_name` is its metadata, "" where it has none.

    A collective is one wherever it happens. A named scope comes next; what no scope claims is a
    matrix product or "other" (norms, activations, residuals, embedding).
    """
    if is_collective:
        return COLLECTIVES
    for word in reversed(_WORD.findall(op_name)):
        if word in SCOPE_PARTS:
            return SCOPE_PARTS[word]
    return MATRICES if is_matrix_product else OTHER
