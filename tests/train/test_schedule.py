# SPDX-License-Identifier: Apache-2.0
"""Protects the learning rate: its value at every progress, in every unit, and its replay.

Oracle: values worked out by hand from the formulas (cosine at 0, 1/3, 1/2, 1; a straight line for
the decay), so nothing here calls the code to learn what is right. Tolerance: 1e-12 relative, a few
float64 roundings.
"""

import itertools
import math

import pytest

from atomic_lib.train.schedule import RecordedSchedule, Schedule

PEAK = 3e-4
UNITS = {"time": 1000.0, "steps": 1000, "tokens": 64_000}
HAND_VALUES = {
    # progress -> shape with floor 0.1 and decay 0.25
    "cosine": {0.0: 1.0, 1 / 3: 0.1 + 0.9 * 0.75, 0.5: 0.55, 1.0: 0.1},
    "wsd": {0.0: 1.0, 0.5: 1.0, 0.75: 1.0, 0.875: 0.55, 1.0: 0.1},
    "constant": {0.0: 1.0, 0.5: 1.0, 1.0: 1.0},
}


def make(shape="cosine", unit="steps", **changes):
    values = {
        "shape": shape,
        "unit": unit,
        "peak": PEAK,
        "horizon": UNITS[unit],
        "warmup_steps": 0,
        "tokens_per_step": 64,
        "decay_fraction": 0.25,
        "floor_fraction": 0.1,
    }
    return Schedule(**{**values, **changes})


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("shape", "progress", "factor"),
    [(s, p, f) for s, values in HAND_VALUES.items() for p, f in values.items()],
)
def test_rate_follows_its_shape_in_every_unit(unit, shape, progress, factor):
    # A horizon of 3000 steps makes 1/3 a whole number of steps.
    scale = 3
    schedule = make(shape, unit, horizon=scale * UNITS[unit])
    step = round(progress * scale * 1000)
    # Only the schedule's own unit may count: the others say something else.
    elapsed = progress * scale * 1000.0 if unit == "time" else 1e9
    if unit == "time":
        step = 7
    rate = schedule.rate(step=step, elapsed_seconds=elapsed)
    assert rate == pytest.approx(PEAK * factor, rel=1e-12)


@pytest.mark.parametrize("beyond", [1.0, 1.5, 40.0])
def test_rate_stays_at_the_floor_beyond_the_horizon(beyond):
    schedule = make("cosine", "time")
    rate = schedule.rate(step=0, elapsed_seconds=1000.0 * beyond)
    assert rate == pytest.approx(PEAK * 0.1, rel=1e-12)


def test_warmup_rises_linearly_in_steps_and_multiplies_the_shape():
    schedule = make("cosine", "time", warmup_steps=4)
    rates = [schedule.rate(step=s, elapsed_seconds=500.0) for s in range(6)]
    wanted = [PEAK * 0.55 * w for w in (0.25, 0.5, 0.75, 1, 1, 1)]
    assert rates == pytest.approx(wanted, rel=1e-12)


def test_cosine_never_rises_after_warmup():
    schedule = make("cosine", "steps", warmup_steps=10)
    rates = [schedule.rate(step=s, elapsed_seconds=0.0) for s in range(10, 1001)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


def test_wsd_without_decay_is_constant():
    schedule = make("wsd", decay_fraction=0.0)
    assert schedule.rate(step=1000, elapsed_seconds=0.0) == PEAK


def test_recorded_schedule_repeats_a_wall_clock_run_on_any_clock():
    schedule = make("cosine", "time", warmup_steps=2)
    clock = [0.0, 0.31, 0.7, 9.1]
    rows = [{"kind": "header"}]
    for step, elapsed in enumerate(clock):
        rows.append(
            {
                "kind": "train",
                "step": step + 1,
                "lr": schedule.rate(step=step, elapsed_seconds=elapsed),
                "elapsed_fraction": schedule.progress(step=step, elapsed_seconds=elapsed),
            }
        )
    replay = RecordedSchedule.from_rows(rows)
    for step, elapsed in enumerate(clock):
        assert replay.rate(step=step, elapsed_seconds=math.nan) == schedule.rate(
            step=step, elapsed_seconds=elapsed
        )
    with pytest.raises(ValueError, match="no row for step 5; they end at step 4"):
        replay.rate(step=4, elapsed_seconds=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0.0}, "horizon: 0.0 steps must be greater than 0"),
        ({"floor_fraction": 1.5}, "floor_fraction: 1.5 is outside"),
        ({"decay_fraction": -0.1}, "decay_fraction: -0.1 is outside"),
    ],
    ids=lambda value: str(value),
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
