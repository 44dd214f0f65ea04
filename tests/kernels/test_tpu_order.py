# SPDX-License-Identifier: Apache-2.0
"""The order in which a grid step's heads are written down."""

import pytest
from atomic_kernels.gdn2.tpu_order import stagger


def written(lag: int, lengths: list[int]) -> list[tuple[int, int]]:
    """(program, stage) in the order in which stages run."""
    order = []

    def program(number: int, length: int):
        for stage in range(length):
            order.append((number, stage))
            yield

    stagger([program(*item) for item in enumerate(lengths)], lag)
    return order


@pytest.mark.parametrize("lag", [1, 2, 3, 10])
@pytest.mark.parametrize("lengths", [[], [1], [4, 4, 4], [5, 1, 3]])
def test_every_stage_runs_once_and_in_its_programs_order(lag: int, lengths: list[int]) -> None:
    order = written(lag, lengths)
    for number, length in enumerate(lengths):
        assert [stage for n, stage in order if n == number] == list(range(length))
    assert len(order) == sum(lengths)


def test_a_program_starts_lag_stages_after_the_one_before_and_goes_first_from_then_on() -> None:
    assert written(2, [4, 4]) == [
        (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip
