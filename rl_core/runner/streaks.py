"""Counts how many of the newest steps in a row went wrong by the semantic rules of failurePolicy.

Who acts is the operator; the runner itself sees to it that what is to be rolled back is not saved.
"""

import math
from collections.abc import Callable, Mapping

from rl_core.api.failure import FailurePolicySpec

MISMATCH = "mismatch/kl"


class Streaks:
    """Steps in a row by rule: nonFiniteLoss, rewardCollapse, klBlowUp, mismatch; 0 where the rule is not set."""

    def __init__(self, policy: FailurePolicySpec) -> None:
        """Watch by `policy`."""
        self._wrong: dict[str, Callable[[Mapping[str, float]], bool | None]] = {}
        """None: the step says nothing either way."""
        loss, reward, kl = policy.non_finite_loss, policy.reward_collapse, policy.kl_blow_up
        if loss is not None:
            self._wrong["nonFiniteLoss"] = _not_finite
        if reward is not None:
            self._wrong["rewardCollapse"] = lambda metrics: metrics.get("reward/mean", math.inf) < reward.below
        if kl is not None:
            self._wrong["klBlowUp"] = lambda metrics: metrics.get("train/approx_kl", 0.0) > kl.above
        if (mismatch := policy.mismatch) is not None:
            self._wrong["mismatch"] = lambda metrics: (
                not metrics[MISMATCH] <= mismatch.kl if MISMATCH in metrics else None
            )
        self.counts = dict.fromkeys(("nonFiniteLoss", "rewardCollapse", "klBlowUp", "mismatch"), 0)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """Take a step's metrics; return the streaks."""
        for name, is_wrong in self._wrong.items():
            if (wrong := is_wrong(metrics)) is not None:
                self.counts[name] = self.counts[name] + 1 if wrong else 0
        return dict(self.counts)


def _not_finite(metrics: Mapping[str, float]) -> bool:
    """Return whether the loss or the gradient of a step was not finite."""
    values = (metrics.get("train/loss", 0.0), metrics.get("train/grad_norm", 0.0))
    return not all(math.isfinite(value) for value in values)
