"""One training step in numbers: the groups that it admitted, on which data ranks, and what became of the others."""

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
    """Runner's clock: when it was admitted or refused."""
    times: GroupTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedGroup:
    """One group of a step that is acknowledged."""

    group_id: str
    prompt_index: int
    """Index in the data set."""
    attempt: int


@dataclass(slots=True)
class StepState:
    """What one step has leased and admitted."""

    step: int
    version: int
    """Version of the weights that it trains."""
    target: int
    """Groups to train; falls when onDrop is shrink."""
    rank_sizes: list[int]
    """Groups admitted by data rank."""
    issued: int = 0
    """Leases given out for the step."""
    dropped: int = 0
    """Dropped groups that the step does without."""
    admitted: dict[str, GroupEntry] = field(default_factory=dict)
    """Entries of the admitted groups by group id."""
    filtered: int = 0
    """Groups without differing rewards, under dynamic sampling."""
    surplus: int = 0
    """Finished groups that the step had no place for."""
    stale: int = 0
    """Groups that are generated again because their tokens are too old."""
    cancelled: int = 0
    """Groups that were out when the step had all its groups; their prompts are the first of the next step."""
    waiting_since: float | None = None
    """When the trainer began to wait for groups that are older than a finished one."""
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

        Groups are dealt to the ranks by their position, so that arrival does not decide; a rank that has its share passes the group to the
        rank that has the fewest.
        """
        sizes = self.rank_sizes
        rank = position % len(sizes)
        if sizes[rank] >= self.target // len(sizes):
            rank = sizes.index(min(sizes))
        sizes[rank] += 1
        return rank

    def sampling_metrics(self, prompts_per_step: int) -> dict[str, float]:
        """Return the metrics of dynamic sampling: generation batches asked for, and what became of their groups."""
        rewards = reward_metrics(list(self.admitted.values()))
        counts = {"batches": self.issued / prompts_per_step, "kept_groups": len(self.admitted)}
        counts |= {"dropped_groups": self.filtered, "surplus_groups": self.surplus}
        metrics = {f"dynamic_sampling/{name}": float(value) for name, value in counts.items()}
        return metrics | ({"filtered_reward": rewards["reward/mean"]} if rewards else {})


def reward_metrics(entries: Sequence[GroupEntry]) -> dict[str, float]:
    """Return `reward/{mean,std,min,max}` over the finite raw rewards of admitted groups, float64."""
    rewards = np.asarray([reward for entry in entries for reward in entry.rewards], dtype=np.float64)
    rewards = rewards[np.isfinite(rewards)]
    if not rewards.size:
        return {}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
