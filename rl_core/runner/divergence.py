"""`DivergenceAlarm`: decides whether a rollout's log-probabilities differ from the trainer's by more than rounding.

In float32 rounding is so small that one difference above the tolerance shows that the weights differ. In bfloat16 single tokens differ by
up to half a nat with the same weights, because the two sides add in different orders. There the median of several checks is compared with
the usual difference of this rollout, so that no single token ends a run.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

RECENT = 5
"""Number of newest checks whose median is compared with the bound."""
CALIBRATION = 10
"""Number of checks after which the usual difference counts as known."""
FACTOR = 4.0
"""The median of the newest checks may be at most this multiple of the usual difference."""
MEMORY = 50
"""Number of checks over which the usual difference is averaged. It is limited because rounding changes as a policy becomes more certain."""
LIMIT = 1.0
"""Largest allowed median, in nats. It holds also before the usual difference is known."""
ROUNDED = 50
"""Smallest bound in bfloat16, as a multiple of the tolerance."""


class DivergenceAlarm:
    """Judges the checks of one rollout, one after the other."""

    def __init__(self, tolerance: float, *, exact: bool) -> None:
        """`tolerance`: largest difference in float32, in nats. `exact`: whether both sides compute in float32."""
        self._tolerance, self._exact = tolerance, exact
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._usual_difference, self._num_checks = 0.0, 0

    def judge(self, differences: Sequence[float]) -> tuple[float, float] | None:
        """Return (difference, bound) if the rollout computes with other weights, else None.

        `differences` are those of one check: absolute, one per token, in nats.
        """
        if self._exact or any(map(math.isnan, differences)):
            largest = max(
                differences, default=0.0, key=lambda difference: math.inf if math.isnan(difference) else difference
            )
            return None if largest <= self._tolerance else (largest, self._tolerance)
        mean = fmean(differences) if differences else 0.0
        self._recent.append(mean)
        recent, limit = median(self._recent), self._bound()
        if len(self._recent) == RECENT and recent > limit:
            return recent, limit
        self._num_checks += 1
        self._usual_difference += (mean - self._usual_difference) / min(self._num_checks, MEMORY)
        return None

    def _bound(self) -> float:
        if self._num_checks < CALIBRATION:
            return LIMIT
        return min(LIMIT, max(ROUNDED * self._tolerance, FACTOR * self._usual_difference))
