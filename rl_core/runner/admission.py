"""The admission policy: which groups may be leased and which finished groups may train, by policy version.

The two policies are pure: they decide from what they are given and keep nothing between calls. `OnPolicy` is the policy of
`ReasoningRunner`, `Bounded` that of `AsyncReasoningRunner`. No other module compares the versions of groups.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry


class Verdict(Enum):
    """What becomes of a finished group."""

    ADMIT = "admit"
    """It trains in the open step."""
    DEFER = "defer"
    """It may train later; its record stays on the channel."""
    REFUSE = "refuse"
    """It never trains; its record is discarded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCapacity:
    """How many groups the open step trains, and how many are on their way to it."""

    version: int
    """Version of the weights that the step trains."""
    target: int
    """Groups the step trains."""
    admitted: int
    """Groups it has admitted."""
    out: Mapping[int, int]
    """Groups that are leased, or finished and deferred, by version: that of the lease, or the lowest of the finished group's tokens."""

    @property
    def places(self) -> int:
        """Return the number of groups that the step still lacks."""
        return self.target - self.admitted


class Admission(Protocol):
    """Decides for the open step. Implemented by `OnPolicy` and `Bounded`."""

    runs_ahead: bool
    """Whether a group that is out when the step has all its groups may still train in a later step."""

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Apply another spec of the running job."""
        ...

    def room(self, capacity: StepCapacity, *, served: int) -> int:
        """Return how many more groups may be leased to a rollout that serves version `served`; below 1 = none."""
        ...

    def decide(self, entry: GroupEntry, capacity: StepCapacity, *, num_ahead: int) -> Verdict:
        """Return what becomes of a finished group, which `capacity.out` includes.

        `num_ahead`: groups before it in the ledger's order that may still be trained. Of two groups, the one with the smaller
        (entry.v_min, position in the order) is never deferred where the other is admitted.
        """
        ...


class OnPolicy:
    """Every token of a step comes from the weights that the step trains.

    `oversample` times the step's groups are leased at once. Speed does not decide which of them train: a finished group is admitted once
    fewer groups precede it in the ledger's order than the step has free places. Groups beyond the step's number only replace groups
    that were dropped or filtered, and a long sample is never replaced by a short one.
    """

    runs_ahead = False

    def __init__(self, oversample: float = 1.0) -> None:
        """`oversample` 1 = as many as the step trains."""
        self._oversample = oversample

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Do nothing: an on-policy job stays on policy while it runs."""

    def room(self, capacity: StepCapacity, *, served: int) -> int:
        """Return what the step lacks, times `oversample`, less what is out; 0 for a rollout of another version."""
        if capacity.places <= 0 or served != capacity.version:
            return 0
        return math.ceil(capacity.target * self._oversample) - capacity.admitted - sum(capacity.out.values())

    def decide(self, entry: GroupEntry, capacity: StepCapacity, *, num_ahead: int) -> Verdict:
        """Refuse a group with a token of another version; admit it when there is a place that no group before it can take."""
        if not entry.v_min == entry.v_max == capacity.version:
            return Verdict.REFUSE
        return Verdict.ADMIT if num_ahead < capacity.places else Verdict.DEFER


class Bounded:
    """No token is more than `max_staleness` versions older than the weights it trains; generation runs ahead as far as that allows.

    A group whose oldest token is of version v must train at version v + max_staleness at the latest. All groups can train in time when,
    for each number of later steps, the groups due by then are no more than the places until then. Leases and admissions keep it so:
    a young group that would take the place of an older one waits for a later step, so slow samples train as often as fast ones.
    """

    runs_ahead = True

    def __init__(self, max_staleness: int, prompts_per_step: int) -> None:
        """`prompts_per_step`: places of each later step. Raises ValueError for a bound below 1, which `OnPolicy` is for."""
        if max_staleness < 1:
            raise ValueError(f"max_staleness must be at least 1, got {max_staleness}; use OnPolicy for 0")
        self.max_staleness, self._per_step = max_staleness, prompts_per_step

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Apply the bound of `algorithm`; groups that a smaller bound excludes are generated again."""
        self.max_staleness = algorithm.max_staleness

    def room(self, capacity: StepCapacity, *, served: int) -> int:
        """Return how many groups of version `served` can be added so that each of those out can still train in time."""
        first = served - self._oldest(capacity)
        if first < 0:
            return 0
        return min(self._spare(capacity, ahead) for ahead in range(first, self.max_staleness + 1))

    def decide(self, entry: GroupEntry, capacity: StepCapacity, *, num_ahead: int) -> Verdict:
        """Refuse a group beyond the bound; defer one that would take the place of an older group. One that is due now is admitted."""
        due = entry.v_min - self._oldest(capacity)
        if due < 0:
            return Verdict.REFUSE
        in_time = all(self._spare(capacity, ahead) >= 1 for ahead in range(due))
        return Verdict.ADMIT if in_time and capacity.places > 0 else Verdict.DEFER

    def _oldest(self, capacity: StepCapacity) -> int:
        """Return the oldest version that may train in the open step."""
        return capacity.version - self.max_staleness

    def _spare(self, capacity: StepCapacity, ahead: int) -> int:
        """Return the places up to `ahead` steps from the open one, less the groups that are due by then."""
        oldest = self._oldest(capacity)
        places = capacity.places + ahead * self._per_step
        # Groups beyond the bound are generated again and take no place.
        return places - sum(count for version, count in capacity.out.items() if oldest <= version <= oldest + ahead)
