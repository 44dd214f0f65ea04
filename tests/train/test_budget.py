# SPDX-License-Identifier: Apache-2.0
"""Protects the time budget: what is kept in reserve, when a run stops, what it predicts.

Oracle: a simulated clock, on which every step, evaluation and checkpoint takes a known time; the
real end is found by playing the run to its end. Times are powers of two, so sums are exact.
"""

import pytest

from atomic_lib.train.budget import FINISHING_SECONDS, Budget

STEP, EVALUATION, SAVE = 0.5, 16.0, 8.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(budget_seconds=1024.0, **changes):
    clock = Clock()
    settings = {"eval_every": 10, "checkpoint_every_seconds": 60.0, **changes}
    budget = Budget(clock=clock, started_at=1000.0, budget_seconds=budget_seconds, **settings)
    budget.evaluation_seconds, budget.checkpoint_seconds = EVALUATION, SAVE
    return clock, budget


def play(clock, budget, *, predict_at=20):
    """Plays a run; returns its last step, its end on the clock and what was predicted."""
    step, saved_at, predicted = 0, clock.now, None
    while not budget.is_used_up():
        clock.now += STEP
        step += 1
        budget.record_step(STEP)
        if step == predict_at:
            predicted = budget.predict_final_step(step=step, max_steps=None)
        if step % budget.eval_every == 0:
            clock.now += EVALUATION
        if clock.now - saved_at >= budget.checkpoint_every_seconds:
            clock.now += SAVE
            saved_at = clock.now
    return step, clock.now + EVALUATION + SAVE + FINISHING_SECONDS, predicted


@pytest.mark.parametrize("eval_every", [50, 10_000])
def test_the_run_ends_inside_its_budget_and_uses_it(eval_every):
    clock, budget = make(eval_every=eval_every, checkpoint_every_seconds=128.0)
    step, end, predicted = play(clock, budget)
    margin = 0.5 * (EVALUATION + SAVE + FINISHING_SECONDS)
    assert 1024.0 - margin - EVALUATION - SAVE - STEP <= end - 1000.0 <= 1024.0
    # One evaluation or checkpoint more or less is the most that a prediction can miss by.
    assert abs(predicted - step) <= (EVALUATION + SAVE) / STEP


def test_reserve_never_takes_more_than_a_quarter():
    _, budget = make(budget_seconds=40.0)
    assert budget.reserve_seconds == 10.0
    assert budget.left() == 30.0


def test_earlier_sessions_count_for_a_schedule_in_time_only():
    clock, total = make(earlier_seconds=600.0, counts_earlier=True)
    _, session = make(earlier_seconds=600.0, counts_earlier=False)
    clock.now += 24.0
    assert total.elapsed() == 624.0
    assert total.left() == 1024.0 - 624.0 - total.reserve_seconds
    assert session.elapsed() == 600.0
    assert session.left() == 1024.0 - session.reserve_seconds


def test_without_a_budget_only_the_steps_limit_a_run():
    _, budget = make(budget_seconds=None)
    budget.record_step(STEP)
    assert not budget.is_used_up()
    assert budget.predict_final_step(step=5, max_steps=80) == 80
    assert budget.predict_final_step(step=5, max_steps=None) is None


def test_a_checkpoint_is_expected_from_its_size_until_one_is_written():
    _, budget = make()
    budget.expect_checkpoint_bytes(2_600_000_000)
    assert budget.checkpoint_seconds == pytest.approx(26.0)
