"""Which groups may be given out and which may train, by policy version. Pure; one object decides both questions.

`OnPolicy` is the policy of `ReasoningRunner`, `Bounded` that of `AsyncReasoningRunner`; nobody else compares versions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the open step stands."""

    version: int
    """Version of the weights that the step trains."""
    target: int
    """Groups the step trains."""
    admitted: int
    """Groups it holds."""
    out: Mapping[int, int]
    """Groups that are with rollouts or on their way back: how many by the version they were leased at, which no token is older than."""
    ahead: int = 0
    """Groups that stand before the one in question in the ledger's order and may still train."""


class Admission(Protocol):
    """Decides for the open step. Implemented by `OnPolicy` and `Bounded`."""

    waits: bool
    """Whether a finished group that the open step has no place for waits for a later one; else it is made again."""

    runs_ahead: bool
    """Whether a group that is out when the step has its own may still train in a later one."""

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Go by another spec of the running job."""
        ...

    def room(self, standing: Standing, *, served: int) -> int:
        """Return how many more groups may be given to a rollout that serves version `served`; below 1 = none."""
        ...

    def may_train(self, entry: GroupEntry, standing: Standing) -> bool | None:
        """Return whether a finished group trains in the open step: False = never, None = in a later one. `standing` is without it."""
        ...


class OnPolicy:
    """Every token of a step comes from the weights that the step trains.

    `oversample` times the step's groups are out at once. Who trains is not a matter of speed: a finished group trains only once fewer
    groups than the step lacks stand before it in the ledger's order. So those beyond the step's number only stand in for groups that
    failed or were filtered, and a long sample is never replaced by a short one.
    """

    runs_ahead = False

    def __init__(self, oversample: float = 1.0) -> None:
        """`oversample` 1 = as many as the step trains."""
        self._oversample = oversample
        self.waits = oversample > 1

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Do nothing: a job that is on policy stays so while it runs."""

    def room(self, standing: Standing, *, served: int) -> int:
        """Return what the step lacks and what may stand in for it: no group runs ahead for a later step."""
        if standing.admitted >= standing.target or served != standing.version:
            return 0
        return math.ceil(standing.target * self._oversample) - standing.admitted - sum(standing.out.values())

    def may_train(self, entry: GroupEntry, standing: Standing) -> bool | None:
        """Return whether all tokens are of the step's version; None while a place is not certain to be left by the groups before it."""
        if not entry.v_min == entry.v_max == standing.version:
            return False
        return True if not self.waits or standing.ahead < standing.target - standing.admitted else None


class Bounded:
    """No token is more than `max_staleness` versions older than the weights it trains; generation runs ahead as far as that allows.

    A group of version v must train at version v + max_staleness at the latest. A schedule exists as long as, for each number of steps
    ahead, the groups due by then are no more than the places until then. Leases and admissions keep it so: a young group that would take
    the place of an older one that still runs waits for a later step, so that slow samples train as often as fast ones.
    """

    waits = runs_ahead = True

    def __init__(self, max_staleness: int, prompts_per_step: int) -> None:
        """`prompts_per_step`: places of each later step. Raises ValueError for a bound below 1, which `OnPolicy` is for."""
        if max_staleness < 1:
            raise ValueError(f"max_staleness must be at least 1, got {max_staleness}; use OnPolicy for 0")
        self.max_staleness, self._per_step = max_staleness, prompts_per_step

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Take over the bound; groups that a smaller one excludes are made again when their record comes."""
        self.max_staleness = algorithm.max_staleness

    def room(self, standing: Standing, *, served: int) -> int:
        """Return how many groups of version `served` can be added so that each of those out can still train in time."""
        first = served - self._oldest(standing)
        if first < 0:
            return 0
        return min(self._spare(standing, ahead) for ahead in range(first, self.max_staleness + 1))

    def may_train(self, entry: GroupEntry, standing: Standing) -> bool | None:
        """Return False beyond the bound, None where an older group needs the place; a group that is due is never kept waiting."""
        due = entry.v_min - self._oldest(standing)
        if due < 0:
            return False
        return True if all(self._spare(standing, ahead) >= 1 for ahead in range(due)) else None

    def _oldest(self, standing: Standing) -> int:
        """Return the oldest version that may train in the open step."""
        return standing.version - self.max_staleness

    def _spare(self, standing: Standing, ahead: int) -> int:
        """Return the places up to `ahead` steps from the open one, less the groups that are due by then."""
        oldest = self._oldest(standing)
        places = standing.target - standing.admitted + ahead * self._per_step
        # What is beyond the bound will be made again, and takes no place.
        return places - sum(count for version, count in standing.out.items() if oldest <= version <= oldest + ahead)
