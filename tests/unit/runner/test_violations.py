"""Streaks of steps that went wrong count in a row, only where a rule is set."""

from rl_core.api.failure import FailurePolicySpec
from rl_core.runner.violations import ConsecutiveViolations

RULES = {
    "nonFiniteLoss": {"action": "Pause"},
    "rewardCollapse": {"below": 0.1, "action": "Pause"},
    "klBlowUp": {"above": 1.0, "action": "Pause"},
    "mismatch": {"kl": 0.01, "action": "Pause"},
}
GOOD = {"train/loss": 0.1, "train/grad_norm": 1.0, "reward/mean": 0.5, "train/approx_kl": 0.01}


def test_each_rule_counts_its_steps_in_a_row_and_a_good_step_ends_the_streak():
    streaks = ConsecutiveViolations(FailurePolicySpec.model_validate(RULES))
    wrong = [
        {"train/loss": float("nan")},
        {"train/grad_norm": float("inf")},
        {"reward/mean": 0.0},
        {"train/approx_kl": 1.5},
    ]
    seen = [dict(streaks.observe(GOOD | metrics)) for metrics in wrong]
    assert [s["nonFiniteLoss"] for s in seen] == [1, 2, 0, 0]
    assert [s["rewardCollapse"] for s in seen] == [0, 0, 1, 0]
    assert [s["klBlowUp"] for s in seen] == [0, 0, 0, 1]


def test_a_step_without_a_measured_mismatch_neither_counts_nor_ends_its_streak():
    streaks = ConsecutiveViolations(FailurePolicySpec.model_validate(RULES))
    steps = [{"mismatch/kl": 0.02}, {}, {"mismatch/kl": float("nan")}, {"mismatch/kl": 0.01}]
    assert [streaks.observe(GOOD | metrics)["mismatch"] for metrics in steps] == [1, 1, 2, 0]


def test_without_rules_nothing_counts():
    streaks = ConsecutiveViolations(FailurePolicySpec())
    assert streaks.observe({"train/loss": float("nan"), "reward/mean": -9.0}) == {
        "nonFiniteLoss": 0,
        "rewardCollapse": 0,
        "klBlowUp": 0,
        "mismatch": 0,
    }
