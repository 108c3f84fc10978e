"""The state of one training step: the groups that it admitted, their data ranks, and counts of all others."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_core.api.records import GroupTimes
from rl_core.messages.groups import GroupEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """A group that a step admitted or refused, for the trace."""

    group_id: str
    rank: int | None
    """Data rank that trains it; None for a refused group."""
    trains: bool
    decided: float
    """Runner's clock, in seconds, at which it was admitted or refused."""
    times: GroupTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class FilteredGroup:
    """A group that dynamic sampling discarded and whose samples are kept."""

    group_id: str
    token: str
    """Token of its lease. It is the key of the group's record on the channel `trajectories`."""
    step: int
    """Training step for which it was generated."""
    version: int
    """Version of the weights that this step trains."""
    why: str
    """The rule that its rewards violate, with the rewards; see `explain_filtered`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedGroup:
    """One trained group of a step."""

    group_id: str
    prompt_index: int
    """Index in the data set."""
    attempt: int


@dataclass(slots=True)
class StepState:
    """Counts and admitted groups of one training step. Changed by the training account only."""

    step: int
    version: int
    """Version of the weights that it trains."""
    target: int
    """Number of groups to train. Dropped groups reduce it if `algorithm.onDrop` is shrink."""
    rank_sizes: list[int]
    """Number of admitted groups by data rank."""
    issued: int = 0
    """Leases given out for the step."""
    dropped: int = 0
    """Dropped groups that were not replaced."""
    admitted: dict[str, GroupEntry] = field(default_factory=dict)
    """Entries of the admitted groups by group id."""
    filtered: int = 0
    """Groups without differing rewards, under dynamic sampling."""
    filtered_rewards: list[float] = field(default_factory=list)
    """The rewards of these groups, without those of masked samples."""
    surplus: int = 0
    """Finished groups that arrived when the step was complete."""
    stale: int = 0
    """Groups that are generated again because their tokens are too old."""
    cancelled: int = 0
    """Groups that were out when the step had all its groups; their prompts are the first of the next step."""
    waiting_since: float | None = None
    """Runner's clock, in seconds, since which a finished group is deferred because of older ones; None while there is none."""
    ended: bool = False
    """Whether the data ranks were informed that the step is smaller than planned."""
    spans: list[GroupSpan] = field(default_factory=list)
    """Groups that were admitted or refused, in that order."""

    @property
    def complete(self) -> bool:
        """Return whether the step has all its groups."""
        return len(self.admitted) >= self.target

    def assign(self, position: int) -> int:
        """Return the data rank for the group at `position` of the ledger's order, and count it there.

        Groups are assigned round-robin by position, so that the order of arrival does not matter. If that rank has its full share already,
        the rank with the fewest groups gets the group.
        """
        sizes = self.rank_sizes
        rank = position % len(sizes)
        if sizes[rank] >= self.target // len(sizes):
            rank = sizes.index(min(sizes))
        sizes[rank] += 1
        return rank

    def sampling_metrics(self, prompts_per_step: int) -> dict[str, float]:
        """Return the metrics of dynamic sampling: generation batches, and the numbers of groups that were kept, dropped or surplus."""
        rewards = reward_metrics(list(self.admitted.values()))
        counts = {"batches": self.issued / prompts_per_step, "kept_groups": len(self.admitted)}
        counts |= {"dropped_groups": self.filtered, "surplus_groups": self.surplus}
        metrics = {f"dynamic_sampling/{name}": float(value) for name, value in counts.items()}
        return metrics | ({"filtered_reward": rewards["reward/mean"]} if rewards else {})


def explain_filtered(rewards: Sequence[float], min_std: float) -> str:
    """Return an explanation why dynamic sampling discards a group with these `rewards`, as text for people.

    NaN stands for the reward of a masked sample, which does not count. `min_std` is `algorithm.dynamicSampling.minStd`: the sample
    standard deviation of the rewards must be greater.
    """
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if len(finite) < 2:
        return f"algorithm.dynamicSampling needs at least two rewards in a group, got {len(finite)}"
    if len(set(finite)) == 1:
        return f"algorithm.dynamicSampling needs rewards that differ, got {len(finite)} times {finite[0]:g}"
    deviation = statistics.stdev(finite)
    return f"algorithm.dynamicSampling.minStd needs rewards with a deviation above {min_std:g}, got {deviation:.4g}"


def reward_metrics(entries: Sequence[GroupEntry]) -> dict[str, float]:
    """Return `reward/mean`, `std`, `min` and `max` over the finite raw rewards of admitted groups, computed in float64.

    `reward/missing` is the number of samples without a finite reward.
    """
    all_rewards = np.asarray([reward for entry in entries for reward in entry.rewards], dtype=np.float64)
    rewards = all_rewards[np.isfinite(all_rewards)]
    missing = {"reward/missing": float(all_rewards.size - rewards.size)}
    if not rewards.size:
        return missing
    return missing | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
