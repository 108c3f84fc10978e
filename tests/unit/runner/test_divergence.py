"""The alarm of the content check: never on rounding, soon on other weights.

The rounding of bfloat16 is simulated by what was measured between two engines on the same weights: a median of 0.09 nats and at most 0.48.
"""

import random

import pytest

from rl_core.runner.divergence import CALIBRATION, RECENT, DivergenceAlarm

TOKENS = 2


def rounding(source, scale=0.133):
    """Differences of one check on the same weights: the absolute value of a normal variable has its median at 0.674 deviations."""
    return [min(0.48, abs(source.gauss(0, scale))) for _ in range(TOKENS)]


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_checks_on_the_same_weights_in_bfloat16_raise_no_alarm(seed):
    source, alarm = random.Random(seed), DivergenceAlarm(1e-3, exact=False)
    assert all(alarm.judge(rounding(source)) is None for _ in range(1000))


def test_rounding_that_grows_slowly_and_single_outliers_raise_no_alarm():
    source, alarm = random.Random(0), DivergenceAlarm(1e-3, exact=False)
    for check in range(1000):
        differences = [5.0] * TOKENS if check % 50 == 49 else rounding(source, 0.02 + check * 1e-4)
        assert alarm.judge(differences) is None


@pytest.mark.parametrize("before", [0, CALIBRATION, 500])
@pytest.mark.parametrize("seed", range(10))
def test_other_weights_are_found_within_a_few_checks(seed, before):
    source, alarm = random.Random(seed), DivergenceAlarm(1e-3, exact=False)
    for _ in range(before):
        assert alarm.judge(rounding(source)) is None
    found = [alarm.judge([abs(source.gauss(0, 3.0)) for _ in range(TOKENS)]) for _ in range(3 * RECENT)]
    difference, bound = next(one for one in found if one is not None)
    assert difference > bound


def test_in_float32_the_first_difference_above_the_tolerance_is_an_alarm():
    alarm = DivergenceAlarm(1e-3, exact=True)
    assert alarm.judge([1e-3, 0.0]) is None and alarm.judge([]) is None
    assert alarm.judge([0.0, 1.1e-3]) == (1.1e-3, 1e-3)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_no_number_is_an_alarm_at_once(exact):
    found = DivergenceAlarm(1e-3, exact=exact).judge([0.0, float("nan"), 0.5])
    assert found is not None and str(found[0]) == "nan"
