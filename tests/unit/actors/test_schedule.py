"""The learning rate of every applied step."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_wsd_schedule

from rl_core.actors.schedule import LRSchedule
from rl_core.api.errors import ConfigError
from rl_core.api.optimizer import OptimizerSpec


def test_the_worked_example_of_the_specification():
    schedule = LRSchedule(peak=2e-4, floor=2e-5, warmup=10, total=110, style="cosine")
    expected = {0: 2e-5, 4: 1e-4, 9: 2e-4, 10: 2e-4, 35: 1.736396e-4, 60: 1.1e-4, 110: 2e-5, 500: 2e-5}
    for step, rate in expected.items():
        assert schedule(step) == pytest.approx(rate, rel=1e-6), step


def test_linear_falls_evenly_and_constant_stays():
    linear = LRSchedule(peak=1.0, floor=0.2, total=10, style="linear")
    assert [linear(step) for step in (0, 5, 10, 11)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert LRSchedule(peak=3.0, total=10)(7) == 3.0


@given(warmup=st.integers(0, 10), stable=st.integers(0, 20), decay=st.integers(1, 20), floor=st.floats(0, 1))
def test_wsd_is_that_of_transformers(warmup, stable, decay, floor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    counts = {"num_warmup_steps": warmup, "num_stable_steps": stable, "num_decay_steps": decay}
    theirs = get_wsd_schedule(optimizer, **counts, min_lr_ratio=floor).lr_lambdas[0]
    total = warmup + stable + decay
    ours = LRSchedule(peak=0.5, floor=floor * 0.5, warmup=warmup, decay=decay, total=total, style="wsd")
    for step in range(warmup, total + 3):
        assert ours(step) == pytest.approx(0.5 * theirs(step), abs=1e-12)
    # Theirs begins the warm-up at the floor with a step of that rate, ours one step later, as with the other styles.
    assert [ours(step) for step in range(warmup)] == pytest.approx(
        [0.5 * (step + 1) / warmup for step in range(warmup)]
    )


def test_the_share_of_wsd_that_decays_is_of_all_steps():
    for ratio, steps in (({}, 10), ({"decayRatio": 0.29}, 29)):
        schedule = LRSchedule.from_spec({"learningRate": 1.0, "schedule": {"style": "wsd", **ratio}}, total=100)
        assert schedule.decay == steps and schedule(100 - steps) == 1.0 and schedule(101 - steps) < 1.0


@given(
    style=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 20),
    more=st.integers(1, 50),
    floor=st.floats(0, 1),
)
def test_the_rate_rises_to_the_peak_then_never_rises_and_stays_above_the_floor(style, warmup, more, floor):
    decay = more // 2 if style == "wsd" else 0
    schedule = LRSchedule(peak=1.0, floor=floor, warmup=warmup, decay=decay, total=warmup + more, style=style)
    rates = [schedule(step) for step in range(warmup + more + 5)]
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert min(after) >= floor - 1e-12 and max(rates) <= 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 10, "total": 10},
        {"floor": 2.0, "total": 10},
        {"style": "step", "total": 10},
        {"style": "wsd", "warmup": 6, "decay": 5, "total": 10},
    ],
    ids=["warmup", "floor", "style", "decay"],
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
