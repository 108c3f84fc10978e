"""One step's intake: gives prompt groups out, admits finished ones, replaces what is filtered or dropped.

The runner's loop opens a step; data ranks (through `admit`) and rollouts (through `give_back`) call in from RPC threads while the
loop waits for the actor. All ledger calls of a run go through here, under one lock (invariants I1, I5).

    ledger --lease--> prompts channel --> rollouts --record--> trajectories --> data ranks --admit--> ledger (complete, consume)
                                             '--give_back--> ledger (requeue or drop) --> next prompt
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError, InfrastructureError, RLJobError, SamplingExhausted
from rl_core.channel import Channel
from rl_core.messages.groups import GroupEntry
from rl_core.runner.ledger import GroupState, Lease, PromptLedger

logger = logging.getLogger(__name__)
MESSAGE_ITEMS = 256
"""Prompts put on the channel in one message at most."""


@dataclass(slots=True)
class StepState:
    """What one step has asked for and taken."""

    step: int
    version: int
    target: int
    """Groups to train; falls when onDrop is shrink."""
    issued: int = 0
    admitted: dict[str, GroupEntry] = field(default_factory=dict)
    """Entries of the admitted groups by group id."""
    filtered: int = 0
    surplus: int = 0
    """Finished groups that came when the step had all it wanted."""
    stale: int = 0
    ended: bool = False
    """Whether the data ranks were told that no more groups come."""

    @property
    def complete(self) -> bool:
        """Return whether the step holds its groups."""
        return len(self.admitted) >= self.target

    def sampling_metrics(self, prompts_per_step: int) -> dict[str, float]:
        """Return the metrics of dynamic sampling (algorithms.md 8): generation batches asked for, and what became of their groups."""
        rewards = reward_metrics(list(self.admitted.values()))
        found = {"batches": self.issued / prompts_per_step, "kept_groups": len(self.admitted)}
        found |= {"dropped_groups": self.filtered, "surplus_groups": self.surplus}
        metrics = {f"dynamic_sampling/{name}": float(value) for name, value in found.items()}
        return metrics | ({"filtered_reward": rewards["reward/mean"]} if rewards else {})


class Intake:
    """Feeds one step at a time from the ledger and admits its records."""

    def __init__(
        self,
        ledger: PromptLedger,
        algorithm: AlgorithmSpec,
        *,
        put_prompts: Callable[[list[dict[str, Any]]], None],
        end_step: Callable[[int], None],
        data_ranks: int,
    ) -> None:
        """Put prompt items with `put_prompts`; tell the waiting data ranks with `end_step(step)` that no more groups come.

        `data_ranks`: a shrunk step is cut to a multiple of it.
        """
        self._ledger = ledger
        self._algorithm = algorithm
        self._put_prompts = put_prompts
        self._end_step = end_step
        self._data_ranks = data_ranks
        self._lock = threading.RLock()
        self._step: StepState | None = None
        self._failure: RLJobError | None = None
        self.on_failure: Callable[[RLJobError], None] = lambda error: None
        self.dropped_messages: list[str] = []

    @property
    def ledger(self) -> PromptLedger:
        """Return the ledger; callers other than this class only read it."""
        return self._ledger

    def open(self, step: int, version: int) -> None:
        """Begin `step` at policy `version`: lease its prompts and put them on the channel."""
        with self._lock:
            self._step = StepState(step=step, version=version, target=self._algorithm.prompts_per_step)
            self._issue(self._step.target)

    def close(self) -> StepState:
        """End the step: consume nothing more; return what was admitted, after acknowledging nothing."""
        with self._lock:
            state = self._require_step()
            self._step = None
            return state

    def acknowledge(self, step: int) -> list[tuple[str, int, int]]:
        """Mark the step's groups as trained; return (group id, prompt index, attempt) in ledger order."""
        with self._lock:
            told = {group_id: self._ledger.describe(group_id) for group_id in self._ledger.outstanding()}
            return [(group_id, *told[group_id]) for group_id in self._ledger.acknowledge(step)]

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state."""
        with self._lock:
            return self._ledger.state_dict()

    def metrics(self) -> dict[str, float]:
        """Return the ledger's metrics."""
        with self._lock:
            return self._ledger.metrics()

    def expire(self) -> None:
        """Requeue overdue leases and give their groups out again; called once a second."""
        with self._lock:
            for group_id in self._ledger.expire():
                logger.warning("group %s: lease expired without a record; given out again", group_id)
            self._refill()

    # --- calls from data ranks and rollouts --------------------------------------------------------------------------

    def admit(self, entries: Sequence[GroupEntry]) -> list[bool]:
        """Return for each finished group whether it may train in the open step (protocol.md 2).

        Refused: an old token, another version than the step's, a group without differing rewards under dynamic sampling, surplus.
        """
        with self._lock:
            answers = [self._admit(entry) for entry in entries]
            self._refill()
            self._end_if_cut()
            return answers

    def _admit(self, entry: GroupEntry) -> bool:
        state, token, group_id = self._step, entry.token, entry.group_id
        if state is None or state.complete:
            if state is not None:
                state.surplus += 1
            if self._ledger.outstanding().get(group_id) is GroupState.LEASED:  # of a step that was cut: for a later one
                self._requeue(group_id, token, "stale")
            return False
        if (entry.v_min, entry.v_max) != (state.version, state.version):
            state.stale += 1
            logger.warning(
                "group %s: policy versions %s..%s, step wants %s",
                group_id,
                entry.v_min,
                entry.v_max,
                state.version,
            )
            self._requeue(group_id, token, "stale")
            return False
        if not self._ledger.complete(token, entry):
            return False
        if self._algorithm.dynamic_sampling.enabled and not entry.informative:
            state.filtered += 1
            self._ledger.discard([group_id], "filtered")
            return False
        self._ledger.consume([group_id], state.step)
        state.admitted[group_id] = entry
        return True

    def give_back(self, group_id: str, lease_token: str, reason: str, message: str) -> None:
        """Take back a group a rollout gave up: requeued, or dropped when its budget is used up."""
        with self._lock:
            if self._ledger.outstanding().get(group_id) is GroupState.CONSUMED:
                logger.info("group %s given back (%s) after its record was admitted: nothing to do", group_id, reason)
                return
            logger.warning("group %s given back (%s): %s", group_id, reason, message)
            self._requeue(group_id, lease_token, reason, message)
            self._refill()

    def _requeue(self, group_id: str, token: str, reason: Any, message: str = "") -> None:
        before = self._ledger.counts["dropped"]
        try:
            self._ledger.requeue(token, reason)
        except (KeyError, ValueError) as error:  # a token of an earlier run, or a record that arrived meanwhile
            logger.warning("group %s is not given out again: %s", group_id, error)
            return
        if self._ledger.counts["dropped"] > before:
            self._dropped(group_id, reason, message)

    def _dropped(self, group_id: str, reason: str, message: str) -> None:
        """Count a drop against the budgets; shrink the step when the job says so."""
        self.dropped_messages.append(f"{group_id} ({reason}): {message}")
        algorithm, dropped = self._algorithm, self._ledger.counts["dropped"]
        kind = DataError if reason in ("data", "deadline") else InfrastructureError
        if dropped > algorithm.max_dropped_groups:
            self._fail(
                kind(
                    f"algorithm.maxDroppedGroups allows {algorithm.max_dropped_groups} dropped groups, got {dropped}; "
                    f"the last: group {group_id}, {reason}: {message or 'no further message'}; mend the cause or raise the budget"
                )
            )
        elif 0 < algorithm.max_consecutive_drops <= self._ledger.consecutive_drops:
            self._fail(
                kind(
                    f"algorithm.maxConsecutiveDrops allows fewer than {algorithm.max_consecutive_drops} drops in a row, "
                    f"got {self._ledger.consecutive_drops}; the last: group {group_id}, {reason}: {message}"
                )
            )
        elif algorithm.on_drop == "shrink" and self._step is not None:
            self._shrink(self._step)

    def _shrink(self, state: StepState) -> None:
        if len(state.admitted) + self._out() >= state.target:
            return  # an earlier cut, to a multiple of the ranks, left one over
        floor = self._algorithm.min_batch_fraction * self._algorithm.prompts_per_step
        smaller = (state.target - 1) // self._data_ranks * self._data_ranks
        if smaller < max(floor, self._data_ranks):
            logger.warning("step %s stays at %s groups: minBatchFraction forbids %s", state.step, state.target, smaller)
            return
        if smaller < len(state.admitted):
            return  # what ranks hold stays: the dropped group is replaced
        state.target = smaller
        self._end_if_cut()

    def _end_if_cut(self) -> None:
        """Tell the data ranks when a step that was cut has its groups: each waits for its share of the whole step."""
        state = self._step
        if state is None or state.ended or not state.complete or state.target == self._algorithm.prompts_per_step:
            return
        state.ended = True
        self._end_step(state.step)

    # --- giving out ------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give out as many groups as the step still lacks."""
        state = self._step
        if state is None or self._failure is not None:
            return
        self._issue(state.target - len(state.admitted) - self._out())

    def _out(self) -> int:
        """Return how many groups are with rollouts or on their way back."""
        open_states = (GroupState.LEASED, GroupState.GENERATED)
        return sum(held in open_states for held in self._ledger.outstanding().values())

    def _issue(self, count: int) -> None:
        if count <= 0:
            return
        state = self._require_step()
        rounds = self._algorithm.max_generation_batches
        if state.filtered and state.issued + count > rounds * self._algorithm.prompts_per_step:
            self._fail(
                SamplingExhausted(
                    f"algorithm.maxGenerationBatches allows {rounds} rounds of {self._algorithm.prompts_per_step} groups, got "
                    f"{len(state.admitted)} of {state.target} informative groups in step {state.step} ({state.filtered} without differing "
                    "rewards); raise it, or make the task easier or harder"
                )
            )
            return
        leases = self._ledger.lease(count, "runner", policy_version=state.version)
        state.issued += count
        self._put_prompts([train_item(lease, self._algorithm.group_size) for lease in leases])

    def _require_step(self) -> StepState:
        if self._step is None:
            raise RuntimeError("no step is open; this is a bug of the runner")
        return self._step

    def _fail(self, error: RLJobError) -> None:
        if self._failure is None:
            self._failure = error
            self.on_failure(error)


def train_item(lease: Lease, group_size: int) -> dict[str, Any]:
    """Return the item on the `prompts` channel for a lease."""
    return {
        "mode": "train",
        "sample": lease.sample,
        "group_id": lease.group_id,
        "lease_token": lease.token,
        "attempt": lease.seed_attempt,
        "policy_version": lease.policy_version,
        "num_generations": group_size,
        "greedy": False,
    }


def put_all(channel: Channel, items: Sequence[Any]) -> None:
    """Put items in order, those of one message together; return when the channel accepted every one."""
    for start in range(0, len(items), MESSAGE_ITEMS):
        channel.put_many(items[start : start + MESSAGE_ITEMS])


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
