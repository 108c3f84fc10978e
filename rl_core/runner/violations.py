"""Counts consecutive steps whose metrics violate a rule of failurePolicy.

The operator acts on the counts, which `/status` shows as `streaks`. The runner itself only avoids saving weights that will be rolled back.
"""

import math
from collections.abc import Callable, Mapping

from rl_core.api.failure import FailurePolicySpec

MISMATCH = "mismatch/kl"


class ConsecutiveViolations:
    """Number of consecutive violating steps by rule: nonFiniteLoss, rewardCollapse, klBlowUp, mismatch; 0 for a rule that is not set."""

    def __init__(self, policy: FailurePolicySpec) -> None:
        """Count violations of the rules that are set in `policy`."""
        self._violates: dict[str, Callable[[Mapping[str, float]], bool | None]] = {}
        """Rules by name. A rule returns None if the step has no value of its metric; the count is then unchanged."""
        loss, reward, kl = policy.non_finite_loss, policy.reward_collapse, policy.kl_blow_up
        if loss is not None:
            self._violates["nonFiniteLoss"] = _not_finite
        if reward is not None:
            self._violates["rewardCollapse"] = lambda metrics: metrics.get("reward/mean", math.inf) < reward.below
        if kl is not None:
            self._violates["klBlowUp"] = lambda metrics: metrics.get("train/approx_kl", 0.0) > kl.above
        if (mismatch := policy.mismatch) is not None:
            self._violates["mismatch"] = lambda metrics: (
                not metrics[MISMATCH] <= mismatch.kl if MISMATCH in metrics else None
            )
        self.counts = dict.fromkeys(("nonFiniteLoss", "rewardCollapse", "klBlowUp", "mismatch"), 0)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """Update the counts with the metrics of one step; return the number of consecutive violating steps by rule."""
        for name, violates in self._violates.items():
            if (violated := violates(metrics)) is not None:
                self.counts[name] = self.counts[name] + 1 if violated else 0
        return dict(self.counts)


def _not_finite(metrics: Mapping[str, float]) -> bool:
    """Return whether the loss or the gradient of a step was not finite."""
    values = (metrics.get("train/loss", 0.0), metrics.get("train/grad_norm", 0.0))
    return not all(math.isfinite(value) for value in values)
