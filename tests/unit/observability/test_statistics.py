"""Statistics of a group and over groups."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.rollouts.multi_turn import percentile, summarize

numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@given(numbers)
def test_summaries_agree_with_the_standard_library(values):
    found = summarize(values)
    assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found["median"] == pytest.approx(statistics.median(values), abs=1e-6)
    assert found["stddev"] == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
    assert (found["min"], found["max"], found["histogram"]) == (min(values), max(values), values)


def test_one_value_has_no_deviation_and_n_is_the_divisor_of_the_mean():
    assert math.isnan(summarize([4.0])["stddev"])
    assert summarize([4.0, 2.0], n=4)["mean"] == 1.5


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 95, 0.0),
        ([3, 1, 2], 50, 2.0),
        ([1, 2, 3, 4], 95, 4.0),
        ([5], 0, 5.0),
        ([1, 2], 100, 2.0),
        (np.array([2, 1]), 0, 1.0),
    ],
)
def test_percentile_takes_an_element_without_interpolation(values, p, expected):
    assert percentile(values, p) == expected


def test_groups_aggregate_by_the_last_part_of_the_name():
    groups = [
        {
            "a/min": 1,
            "a/max": 5,
            "a/mean": 2.0,
            "min_x": 3,
            "max_x": 3,
            "max_turns_reached_rate": 0.0,
            "total_turns": 4,
            "max_gen_tokens_per_turn/mean": 10,
        },
        {
            "a/min": 0,
            "a/max": 9,
            "a/mean": math.nan,
            "min_x": 2,
            "max_x": 7,
            "max_turns_reached_rate": 1.0,
            "total_turns": 6,
            "max_gen_tokens_per_turn/mean": 20,
        },
    ]
    found = aggregate_rollout_metrics(groups)
    assert found == {
        "a/min": 0, "a/max": 9, "a/mean": 2.0, "min_x": 2, "max_x": 7, "max_turns_reached_rate": 0.5, "total_turns": 10, "max_gen_tokens_per_turn/mean": 15,
    }  # fmt: skip


def test_raw_values_are_joined_and_other_things_passed_through():
    groups = [{"h": [1, 2], "w": {0: 3}, "name": "x"}, {"h": [3], "w": {0: 1, 1: 5}, "name": "x"}]
    assert aggregate_rollout_metrics(groups) == {"h": [1, 2, 3], "w": {0: 4, 1: 5}, "name": "x"}
    assert aggregate_rollout_metrics([]) == {}
    assert math.isnan(aggregate_rollout_metrics([{"a/mean": math.nan}])["a/mean"])
