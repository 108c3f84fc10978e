"""The learning rate of every applied step."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.actors.schedule import LRSchedule
from rl_core.api.errors import ConfigError
from rl_core.api.roles import OptimizerSpec


def test_the_worked_example_of_the_specification():
    schedule = LRSchedule(peak=2e-4, floor=2e-5, warmup=10, total=110, style="cosine")
    expected = {0: 2e-5, 4: 1e-4, 9: 2e-4, 10: 2e-4, 35: 1.736396e-4, 60: 1.1e-4, 110: 2e-5, 500: 2e-5}
    for step, rate in expected.items():
        assert schedule(step) == pytest.approx(rate, rel=1e-6), step


def test_linear_falls_evenly_and_constant_stays():
    linear = LRSchedule(peak=1.0, floor=0.2, total=10, style="linear")
    assert [linear(step) for step in (0, 5, 10, 11)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert LRSchedule(peak=3.0, total=10)(7) == 3.0


@given(
    style=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    more=st.integers(1, 50),
    floor=st.floats(0, 1),
)
def test_the_rate_rises_to_the_peak_then_never_rises_and_stays_above_the_floor(style, warmup, more, floor):
    schedule = LRSchedule(peak=1.0, floor=floor, warmup=warmup, total=warmup + more, style=style)
    rates = [schedule(step) for step in range(warmup + more + 5)]
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert min(after) >= floor - 1e-12 and max(rates) <= 1.0


@pytest.mark.parametrize(
    "options",
    [{"warmup": 10, "total": 10}, {"floor": 2.0, "total": 10}, {"style": "step", "total": 10}],
    ids=["warmup", "floor", "style"],
)
def test_impossible_schedules_are_refused(options):
    with pytest.raises(ConfigError, match="got"):
        LRSchedule(peak=1.0, **options)


def test_ratios_of_the_spec_become_numbers():
    spec = OptimizerSpec.model_validate(
        {"learningRate": 2e-4, "schedule": {"style": "cosine", "warmupRatio": 0.1, "minLearningRateRatio": 0.5}}
    )
    schedule = LRSchedule.from_spec(spec, total=50)
    assert (schedule.warmup, schedule.floor) == (5, 1e-4)
    assert LRSchedule.from_spec({"learningRate": 1.0}, total=5)(0) == 1.0


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.29, 100, 29), (0.07, 100, 7), (0.1, 15, 1), (0.58, 50, 29)])
def test_a_ratio_that_gives_whole_steps_loses_none_to_rounding(ratio, total, steps):
    spec = {"learningRate": 1.0, "schedule": {"style": "linear", "warmupRatio": ratio}}
    assert LRSchedule.from_spec(spec, total=total).warmup == steps
