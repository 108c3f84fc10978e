"""The prompt ledger: which prompt groups are out, with whom, which were trained, which come next.

It is the only account of a group and the only authority over leases. Its caller serialises calls (`dispatcher`). A group goes
pending -> leased -> generated -> consumed -> acknowledged, or ends as dropped (budget) or discarded (surplus, filtered).
Only the record that carries the group's current token counts, so a group is trained at most once; a checkpoint holds as
final exactly what was final when it was taken, so a resume neither skips nor repeats a group.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args

from rl_core.api.errors import ConfigError
from rl_core.messages.groups import RequeueReason
from rl_core.runner.prompt_order import Dataset, PromptOrder

SEED_REASONS: frozenset[str] = frozenset({"data", "deadline"})
"""Failures after which a sample is drawn with another seed; a redelivery after a loss repeats the same sample."""


class GroupState(StrEnum):
    """PENDING -> LEASED -> GENERATED -> CONSUMED -> ACKNOWLEDGED, or DROPPED, or DISCARDED.

    GENERATED: its record is on its way to a data rank, or has come. No rollout has to answer for it any more.
    """

    PENDING = "pending"
    LEASED = "leased"
    GENERATED = "generated"
    CONSUMED = "consumed"
    ACKNOWLEDGED = "acknowledged"
    DROPPED = "dropped"
    DISCARDED = "discarded"


OUT = frozenset({GroupState.LEASED, GroupState.GENERATED})
"""With a rollout, or on the way back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A prompt group given out for generation."""

    group_id: str
    """`{data_epoch}-{index}`."""
    token: str
    """Unique per lease; the first record that carries the current one is taken."""
    attempt: int
    """1 + earlier leases of the group."""
    sample: Any
    """The data set's item."""
    policy_version: int
    """Version the group is to be generated with."""
    seed_attempt: int = 1
    """1 + earlier failures for data or deadline: the attempt of `sample_seed`."""
    order: int = 0
    """Position in the ledger's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A group that used up the attempts of a reason."""

    group_id: str
    reason: RequeueReason
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldGroup:
    """Who holds a group that is not final, for `/status`."""

    group_id: str
    state: GroupState
    owner: str
    """Member that generates it; empty when nobody does."""
    seconds: float
    """Time in this state."""
    attempt: int


@dataclass(slots=True)
class _Group:
    """One group that is out or has failed before."""

    position: int
    index: int
    state: GroupState = GroupState.PENDING
    since: float = 0.0
    """When it came into this state."""
    token: str = ""
    owner: str = ""
    version: int = 0
    """Policy version of the lease."""
    expires: float = 0.0
    leases: int = 0
    step: int = -1
    failures: dict[str, int] = field(default_factory=dict)
    record: Any = None
    taken: bool = False
    """Whether the record of the lease was taken."""


class PromptLedger:
    """Leases prompt groups in a seeded order and keeps account of each."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        shuffle: bool = True,
        lease_seconds: float,
        max_attempts: int | Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        data_epochs: int | None = None,
        prefix: str = "",
    ) -> None:
        """Take `dataset` in a permutation seeded by (seed, data epoch).

        `max_attempts`: attempts of a group per reason, one number or a map of reason to number; losses of the worker count in a row.
        `data_epochs`: passes over the data set, None = without end. `prefix` begins every group id.
        Raises ValueError for an empty data set or a budget below 1.
        """
        if not len(dataset):
            raise ValueError("dataset must hold at least one prompt, got none; check data.train")
        budgets = (
            max_attempts if isinstance(max_attempts, Mapping) else dict.fromkeys(get_args(RequeueReason), max_attempts)
        )
        low = {reason: count for reason, count in budgets.items() if count < 1}
        if low:
            raise ValueError(f"max_attempts must be at least 1 for each reason, got {low}")
        self.dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._lease_seconds = lease_seconds
        self._budgets = dict(budgets)
        self._clock = clock
        self._end = None if data_epochs is None else data_epochs * len(dataset)
        self._order = PromptOrder(len(dataset), seed=seed, shuffle=shuffle, prefix=prefix)
        self._drops: list[Drop] = []
        self._cursor = 0
        self._low_water = 0
        self._groups: dict[str, _Group] = {}
        self._final: dict[int, GroupState] = {}
        self._pending: list[str] = []
        self._out: Counter[int] = Counter()
        """Groups in `OUT` by the version of their lease."""
        self._given = 0
        """Leases given out; counts the tokens."""
        self._run = secrets.token_hex(4)
        """Begins this ledger's tokens: a record of the run before a resume must not carry one of them."""
        self.counts = {"acknowledged": 0, "dropped": 0, "discarded": 0, "requeued": 0, "late": 0}
        self.consecutive_drops = 0

    # --- life of a group -------------------------------------------------------------------------------------------

    def lease(self, count: int, owner: str, *, policy_version: int = 0) -> list[Lease]:
        """Return `count` leases for `owner`: requeued groups first, in ledger order, then new ones while there are any.

        Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"count of groups to lease must be at least 0, got {count}")
        self._pending.sort(key=lambda group_id: self._groups[group_id].position)
        again, self._pending = self._pending[:count], self._pending[count:]
        fresh = []
        for _ in range(count - len(again)):
            if self._cursor == self._end:
                break
            group_id = self._order.group_id(self._cursor)
            self._groups[group_id] = _Group(position=self._cursor, index=self._order.index_at(self._cursor))
            self._cursor += 1
            fresh.append(group_id)
        return [self._issue(group_id, owner, policy_version) for group_id in [*again, *fresh]]

    def _issue(self, group_id: str, owner: str, policy_version: int) -> Lease:
        group = self._groups[group_id]
        group.owner, group.version = owner, policy_version
        self._enter(group, GroupState.LEASED)
        group.leases += 1
        self._given += 1
        group.token = f"{self._run}.{self._given}.{group_id}"
        group.expires = self._clock() + self._lease_seconds
        return Lease(
            group_id=group_id,
            token=group.token,
            attempt=group.leases,
            sample=self.dataset[group.index],
            policy_version=policy_version,
            seed_attempt=1 + sum(group.failures.get(reason, 0) for reason in SEED_REASONS),
            order=group.position,
        )

    def _enter(self, group: _Group, state: GroupState) -> None:
        self._count_out(group, -1)
        group.state, group.since = state, self._clock()
        self._count_out(group, 1)

    def _count_out(self, group: _Group, change: int) -> None:
        if group.state in OUT:
            self._out[group.version] += change
            if not self._out[group.version]:
                del self._out[group.version]

    def undo(self, token: str) -> None:
        """Take back a lease that never reached its owner: as if it had not been given out."""
        found = self._current(token)
        if found is not None and found[1].state in OUT:
            found[1].leases -= 1
            self._back(*found)

    def left_over(self) -> list[tuple[str, str]]:
        """Return (owner, token) of all that is out; no owner where the record has left it."""
        out = [group for group in self._groups.values() if group.state in OUT]
        return [(group.owner if group.state is GroupState.LEASED else "", group.token) for group in out]

    def ahead(self, group_id: str) -> int:
        """Return how many groups before this one in the order may still be trained: pending again, out or on their way back."""
        open_states, position = (GroupState.PENDING, *OUT), self._group(group_id).position
        return sum(group.position < position and group.state in open_states for group in self._groups.values())

    def renew(self, tokens: Iterable[str], owner: str) -> list[str]:
        """Let the leases of `owner` run on from now; return the tokens that are not its current leases (any more)."""
        stale = []
        for token in tokens:
            found = self._current(token) if self.gave(token) else None
            if found is None or found[1].state is not GroupState.LEASED or found[1].owner != owner:
                stale.append(token)
            else:
                found[1].expires = self._clock() + self._lease_seconds
        return stale

    def extend_deadlines(self, seconds: float) -> None:
        """Let every lease run longer by the time in which this process stood still: nobody could renew."""
        for group in self._groups.values():
            group.expires += seconds

    def requeue_owner(self, owner: str, reason: RequeueReason, message: str = "") -> list[str]:
        """Give back at once what `owner` holds; return the group ids."""
        held = [(group_id, group.token) for group_id, group in self._leased() if group.owner == owner]
        for _, token in held:
            self.requeue(token, reason, message)
        return [group_id for group_id, _ in held]

    def _current(self, token: str) -> tuple[str, _Group] | None:
        """Return the group whose current token this is; None for one that was replaced or is final."""
        if not self.gave(token):
            raise KeyError(f"lease token {token!r} was never given out by this ledger")
        group_id = token.split(".", 2)[2]
        group = self._groups.get(group_id)
        return (group_id, group) if group is not None and group.token == token else None

    def gave(self, token: str) -> bool:
        """Return whether the token is one of this ledger's; it tells that itself, as a run gives out too many to keep them."""
        run, _, rest = token.partition(".")
        number, _, group_id = rest.partition(".")
        return run == self._run and number.isdecimal() and 1 <= int(number) <= self._given and bool(group_id)

    def deliver(self, token: str) -> None:
        """Stop the clock of a lease whose record is on its way; nothing to do for one that is not current, or whose record has come."""
        found = self._current(token) if self.gave(token) else None
        if found is not None and found[1].state is GroupState.LEASED:
            self._enter(found[1], GroupState.GENERATED)

    def awaits(self, token: str) -> bool:
        """Return whether the record of this lease would be taken."""
        found = self._current(token) if self.gave(token) else None
        return found is not None and found[1].state in OUT and not found[1].taken

    def complete(self, token: str, record: Any) -> bool:
        """Take the record of a group; return False (and count it) for one that comes late or again."""
        found = self._current(token) if self.awaits(token) else None
        if found is None:
            self.counts["late"] += 1
            return False
        self._enter(found[1], GroupState.GENERATED)
        found[1].record, found[1].taken = record, True
        return True

    def requeue(self, token: str, reason: RequeueReason, message: str = "") -> bool:
        """Give a group back; return whether it is pending again (False: nothing to do, or dropped by budget).

        Takes effect once per token. From `generated` only with reason stale or epoch; the loss of the worker after its
        record arrived (worker_lost) changes nothing. `message` says why, for a group that is dropped by it. Raises ValueError for an unknown
        reason or a group in another state, KeyError for a token never given out.
        """
        if reason not in self._budgets:
            raise ValueError(f"reason must be one of {sorted(self._budgets)}, got {reason!r}")
        found = self._current(token)
        if found is None:
            return False
        group_id, group = found
        if group.state is GroupState.PENDING or (reason == "worker_lost" and group.state is not GroupState.LEASED):
            return False
        again = reason in ("stale", "epoch") and group.state is GroupState.GENERATED
        if group.state is not GroupState.LEASED and not again:
            raise ValueError(
                f"group {group_id} must be leased to be requeued for {reason}, got state {group.state.value}"
            )
        if reason != "worker_lost":
            group.failures.pop("worker_lost", None)  # losses count in a row: this time the worker answered
        group.failures[reason] = group.failures.get(reason, 0) + 1
        if group.failures[reason] >= self._budgets[reason]:
            self._finish(group_id, GroupState.DROPPED)
            self.consecutive_drops += 1
            self._drops.append(Drop(group_id=group_id, reason=reason, message=message))
            return False
        self._back(group_id, group)
        self.counts["requeued"] += 1
        return True

    def _back(self, group_id: str, group: _Group) -> None:
        group.record, group.taken, group.owner = None, False, ""
        self._enter(group, GroupState.PENDING)
        self._pending.append(group_id)

    def take_drops(self) -> list[Drop]:
        """Return the groups dropped since the last call, however it came to it: whoever holds the budgets must see each."""
        drops, self._drops = self._drops, []
        return drops

    def expire(self) -> list[str]:
        """Requeue leases that were not renewed in time (reason worker_lost); return their group ids. Call it each second."""
        now = self._clock()
        late = [(group_id, group.token) for group_id, group in self._leased() if group.expires <= now]
        for _, token in late:
            self.requeue(token, "worker_lost", "its lease was not renewed")
        return [group_id for group_id, _ in late]

    def consume(self, group_ids: Iterable[str], step: int) -> None:
        """Mark generated groups as taken by training step `step`."""
        for group_id in group_ids:
            group = self._in_state(group_id, GroupState.GENERATED)
            self._enter(group, GroupState.CONSUMED)
            group.step, group.record = step, None

    def acknowledge(self, step: int) -> list[str]:
        """Mark the groups consumed by `step` as trained; return their ids in ledger order.

        Raises ValueError when the step holds no consumed group (it was acknowledged before, or never consumed).
        """
        taken = sorted(
            (group.position, group_id)
            for group_id, group in self._groups.items()
            if group.state is GroupState.CONSUMED and group.step == step
        )
        if not taken:
            raise ValueError(
                f"step {step} must hold consumed groups to be acknowledged, got none: acknowledged before or never consumed"
            )
        for _, group_id in taken:
            self._finish(group_id, GroupState.ACKNOWLEDGED)
        self.consecutive_drops = 0
        return [group_id for _, group_id in taken]

    def discard(self, group_ids: Iterable[str], reason: str) -> None:
        """End groups that will not be trained (surplus, filtered); `reason` names why in the error text."""
        for group_id in group_ids:
            group = self._group(group_id)
            if group.state not in (GroupState.LEASED, GroupState.GENERATED):
                raise ValueError(
                    f"group {group_id} must be leased or generated to be discarded ({reason}), got state {group.state.value}"
                )
            self._finish(group_id, GroupState.DISCARDED)

    def _group(self, group_id: str) -> _Group:
        """Return an outstanding group. Raises ValueError for one that has ended, KeyError for one never leased."""
        if group_id in self._groups:
            return self._groups[group_id]
        position = self._order.position(group_id, end=self._cursor)
        if position is None:
            raise KeyError(f"group {group_id!r} was never leased by this ledger")
        ended = self._final.get(position)
        state = "acknowledged, dropped or discarded" if ended is None else ended.value
        raise ValueError(f"group {group_id} must be outstanding, got state {state}")

    def _in_state(self, group_id: str, state: GroupState) -> _Group:
        group = self._group(group_id)
        if group.state is not state:
            raise ValueError(f"group {group_id} must be {state.value}, got state {group.state.value}")
        return group

    def _finish(self, group_id: str, state: GroupState) -> None:
        group = self._groups.pop(group_id)
        self._count_out(group, -1)
        self._final[group.position] = state
        self.counts[state.value] += 1
        while self._low_water in self._final:
            del self._final[self._low_water]
            self._low_water += 1

    # --- views -----------------------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> tuple[int, int]:
        """Return (prompt index, attempt) of an outstanding group."""
        group = self._group(group_id)
        return group.index, group.leases

    def version(self, group_id: str) -> int:
        """Return the policy version that an outstanding group was leased at last."""
        return self._group(group_id).version

    def held(self) -> list[HeldGroup]:
        """Return every group that is leased, generated or consumed, in ledger order."""
        now = self._clock()
        shown = sorted(
            (g.position, group_id, g) for group_id, g in self._groups.items() if g.state is not GroupState.PENDING
        )
        return [
            HeldGroup(group_id=group_id, state=g.state, owner=g.owner, seconds=now - g.since, attempt=g.leases)
            for _, group_id, g in shown
        ]

    def outstanding(self) -> dict[str, GroupState]:
        """Return the state of each group that is not final."""
        return {group_id: group.state for group_id, group in self._groups.items()}

    def running(self) -> list[tuple[str, str]]:
        """Return (group id, token) of the groups that rollouts generate, those of the oldest lease version first."""
        found = sorted(self._leased(), key=lambda one: (one[1].version, one[1].position))
        return [(group_id, group.token) for group_id, group in found]

    def _leased(self) -> list[tuple[str, _Group]]:
        return [(group_id, group) for group_id, group in self._groups.items() if group.state is GroupState.LEASED]

    def out(self) -> Mapping[int, int]:
        """Return how many groups are with rollouts or on their way back, by the version of their lease."""
        return self._out

    def metrics(self) -> dict[str, float]:
        """Return `ledger/*`."""
        states = [group.state for group in self._groups.values()]
        open_states = (GroupState.PENDING, GroupState.LEASED, GroupState.GENERATED)
        return {
            **{f"ledger/{state.value}": float(states.count(state)) for state in open_states},
            "ledger/acknowledged": float(self.counts["acknowledged"]),
            "ledger/dropped": float(self.counts["dropped"]),
            "ledger/discarded": float(self.counts["discarded"]),
            "ledger/requeued_total": float(self.counts["requeued"]),
            "ledger/late_total": float(self.counts["late"]),
        }

    # --- checkpoint ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state: final groups stay final, everything else is pending after a resume."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self.dataset),
            "data_epoch": self._cursor // len(self.dataset),
            "cursor": self._cursor,
            "low_water": self._low_water,
            "final_above": {str(position): state.value for position, state in sorted(self._final.items())},
            "attempts": {
                str(group.position): {"leases": group.leases, "failures": dict(group.failures)}
                for group in self._groups.values()
                if group.failures
            },
            "counts": dict(self.counts),
            "consecutive_drops": self.consecutive_drops,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; groups that were out are pending again, in ledger order.

        Raises ConfigError (a ValueError) when seed, shuffling or the size of the data set differ from the saved ones.
        """
        mine = {"seed": self._seed, "shuffle": self._shuffle, "size": len(self.dataset)}
        wrong = {key: (state[key], value) for key, value in mine.items() if state[key] != value}
        if wrong:
            told = ", ".join(f"{key} {saved} (saved) and {now} (now)" for key, (saved, now) in wrong.items())
            raise ConfigError(
                f"the ledger must be resumed over the same data order, got {told}; restore them or start afresh"
            )
        self._cursor, self._low_water = int(state["cursor"]), int(state["low_water"])
        self._final = {int(position): GroupState(name) for position, name in state["final_above"].items()}
        self._groups, self._pending, self._out = {}, [], Counter()
        self._run, self._given = secrets.token_hex(4), 0
        for position in range(self._low_water, self._cursor):
            if position in self._final:
                continue
            before = state["attempts"].get(str(position), {"leases": 0, "failures": {}})
            group_id = self._order.group_id(position)
            self._groups[group_id] = _Group(
                position=position,
                index=self._order.index_at(position),
                leases=int(before["leases"]),
                failures=dict(before["failures"]),
            )
            self._pending.append(group_id)
        self.counts = dict(state["counts"])
        self.consecutive_drops = int(state["consecutive_drops"])
