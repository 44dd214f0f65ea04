# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels compile for a v5e, alike for short and long sequences, with nothing around them.

The oracle is the TPU compiler itself, run on this CPU in a subprocess (`compile_schedule`): it
refuses what Mosaic cannot lower and what does not fit in vector memory, and its program shows
every operation beside the kernels. The schedule gate watches cycles; this watches the contract.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from atomic_kernels.schedule import ScheduleReport, compile_schedule

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, is not installed",
    ),
]

CASES = Path(__file__).parent / "tpu_cases.py"
LENGTH = 2048
TOKEN_ARRAY_BYTES = LENGTH * 2 * 128 * 2  # one projection of the layer


def compiled(program: str, **arguments) -> ScheduleReport:
    arguments = {"B": 1, "T": LENGTH, "H": 2, **arguments}
    return compile_schedule(f"atomic_kernels.audit.programs:{program}", arguments=arguments)


@pytest.fixture(scope="module")
def layer() -> ScheduleReport:
    return compile_schedule(f"{CASES}:layer_training", arguments={"T": LENGTH})


def test_a_layer_is_two_kernels_and_no_copies_of_tokens(layer: ScheduleReport):
    """From the projections' products into the kernels and back: [B, T, H K] all the way.

    Heads that come as an argument [B, T, H, K] of the whole program lie otherwise in memory (the
    last two axes are padded to tiles), and there the compiler does copy them.
    """
    names = " ".join(kernel.name for kernel in layer.kernels)
    assert len(layer.kernels) == 2
    assert "gdn2_forward" in names
    assert "gdn2_backward" in names
    around = [
        f"{x.opcode} {x.name} {x.hbm_bytes}"
        for x in layer.operations
        if x.opcode in ("copy", "transpose", "reshape") and x.hbm_bytes >= TOKEN_ARRAY_BYTES
    ]
    assert not around, around


def test_vector_memory_and_bundles_do_not_depend_on_the_length(layer: ScheduleReport):
    """T = 131,072: only the grid is longer."""
    long = compile_schedule(f"{CASES}:layer_training", arguments={"T": 131_072})
    for kernel in layer.kernels:
        (other,) = [x for x in long.kernels if x.name == kernel.name]
        assert other.vmem_bytes == pytest.approx(kernel.vmem_bytes, rel=0.05), kernel.name
        assert other.bundles == pytest.approx(kernel.bundles, rel=0.05), kernel.name


@pytest.mark.parametrize(
    "arguments",
    [
        {"T": 1000, "projections": True, "decay_dtype": "bfloat16"},
        {"T": 256, "projections": True, "decay_parameters": True},
        {"T": 256, "dtype": "float32"},
        {"T": 256, "dtype": "float32", "precision": "f32"},
        {"T": 256, "K": 64, "V": 64},
        {"T": 256, "H": 1, "K": 256, "V": 128, "value_heads": 2},
    ],
    ids=str,
)
def test_every_kind_of_input_compiles(arguments: dict):
    assert len(compiled("training", **arguments).kernels) == 2
