"""The prompt ledger: which prompt groups are out, with whom, which were trained and which come next.

It is the only account of the groups and the only authority over leases. Its caller serialises the calls (`dispatcher`). A group goes
pending -> leased -> generated -> consumed -> acknowledged, or ends as dropped (its attempts are used up) or discarded (filtered).
Only the current lease of a group can finish it, so a group is trained at most once. A checkpoint holds as final exactly the groups that
were final when it was taken, so a resumed run neither skips nor repeats a group.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from rl_core.api.errors import ConfigError
from rl_core.messages.groups import LeaseMode, PromptLease, RequeueReason
from rl_core.runner.group_table import OUT, Group, GroupState, GroupTable
from rl_core.runner.prompt_order import Dataset, PromptOrder

SEED_REASONS: frozenset[str] = frozenset({"data", "deadline"})
"""Failures after which a sample is drawn with another seed; a group that is leased again after a loss repeats the same sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A prompt group given out for generation."""

    group_id: str
    """`{data_epoch}-{index}`."""
    token: str
    """Unique per lease; only the current one of a group can finish it."""
    attempt: int
    """1 + earlier leases of the group."""
    sample: Any
    """The data set's item."""
    policy_version: int
    """Version the group is to be generated with."""
    seconds: float
    """How long it runs unless it is renewed."""
    seed_attempt: int = 1
    """1 + earlier failures for data or deadline: the attempt of `sample_seed`."""
    order: int = 0
    """Position in the ledger's order."""

    def message(
        self, mode: LeaseMode, *, num_generations: int, temperature: float | None = None, given: float = 0.0
    ) -> PromptLease:
        """Return the lease as a rollout receives it."""
        return PromptLease(
            mode=mode,
            group_id=self.group_id,
            token=self.token,
            sample=self.sample,
            num_generations=num_generations,
            attempt=self.seed_attempt,
            policy_version=self.policy_version,
            temperature=temperature,
            lease_seconds=self.seconds,
            given=given,
            order=self.order,
        )


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
    """Process that generates or generated it."""
    seconds: float
    """Time in this state."""
    attempt: int


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
        self._table = GroupTable(clock)
        self._final: dict[int, GroupState] = {}
        """How groups ended, by position, from `_low_water` on; all groups before it have ended."""
        self._num_leases = 0
        """Leases given out; numbers the tokens."""
        self._run = secrets.token_hex(4)
        """Begins this ledger's tokens: a record of the run before a resume must not carry one of them."""
        self.counts = {"acknowledged": 0, "dropped": 0, "discarded": 0, "requeued": 0, "late": 0}
        self.consecutive_drops = 0

    # --- leases ----------------------------------------------------------------------------------------------------

    def lease(self, count: int, owner: str, *, policy_version: int = 0) -> list[Lease]:
        """Return `count` leases for `owner`: requeued groups first, in ledger order, then new ones while there are any.

        Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"count of groups to lease must be at least 0, got {count}")
        leases: list[Lease] = []
        while len(leases) < count and (group := self._table.pop_pending() or self._next()) is not None:
            leases.append(self._issue(group, owner, policy_version))
        return leases

    def _next(self) -> Group | None:
        """Return the next group of the order; None after the last."""
        if self._cursor == self._end:
            return None
        position = self._cursor
        self._cursor += 1
        self._table.add(self._new_group(position))
        return self._table.pop_pending()

    def _new_group(self, position: int) -> Group:
        return Group(group_id=self._order.group_id(position), position=position, index=self._order.index_at(position))

    def _issue(self, group: Group, owner: str, policy_version: int) -> Lease:
        self._num_leases += 1
        group.token = f"{self._run}.{self._num_leases}.{group.group_id}"
        group.owner, group.version, group.leases = owner, policy_version, group.leases + 1
        group.expires = self._clock() + self._lease_seconds
        self._table.move(group, GroupState.LEASED)
        return Lease(
            group_id=group.group_id,
            token=group.token,
            attempt=group.leases,
            sample=self.dataset[group.index],
            policy_version=policy_version,
            seconds=self._lease_seconds,
            seed_attempt=1 + sum(group.failures.get(reason, 0) for reason in SEED_REASONS),
            order=group.position,
        )

    def undo(self, token: str) -> None:
        """Take back a lease that never reached its owner, or a group that no step needs: as if it had not been given out."""
        group = self._current(token)
        if group is not None and group.state in OUT:
            group.leases -= 1
            self._table.move(group, GroupState.PENDING)

    def renew(self, tokens: Iterable[str], owner: str) -> list[str]:
        """Let the leases of `owner` run anew; return the tokens that are not its current leases."""
        stale = []
        for token in tokens:
            group = self._current(token) if self.gave(token) else None
            if group is None or group.state is not GroupState.LEASED or group.owner != owner:
                stale.append(token)
            else:
                self._table.renew(group, self._clock() + self._lease_seconds)
        return stale

    def extend_leases(self, seconds: float) -> None:
        """Let every lease run longer by the time in which this process stood still: no rollout could renew."""
        self._table.extend_leases(seconds)

    def requeue_owner(self, owner: str, reason: RequeueReason, message: str = "") -> list[str]:
        """Requeue what `owner` holds; return the tokens of its leases."""
        tokens = [group.token for group in self._table.held_by(owner)]
        for token in tokens:
            self.requeue(token, reason, message)
        return tokens

    def expire(self) -> list[str]:
        """Requeue groups whose leases were not renewed in time (reason worker_lost); return the tokens of the leases."""
        tokens = [group.token for group in self._table.expired(self._clock())]
        for token in tokens:
            self.requeue(token, "worker_lost", "its lease was not renewed")
        return tokens

    def gave(self, token: str) -> bool:
        """Return whether this ledger gave `token` out. The token itself says so: a run gives out too many to keep them."""
        run, _, rest = token.partition(".")
        number, _, group_id = rest.partition(".")
        return run == self._run and number.isdecimal() and 1 <= int(number) <= self._num_leases and bool(group_id)

    def current(self, token: str) -> Group | None:
        """Return the outstanding group whose newest lease has this token; None for any other text."""
        return self._current(token) if self.gave(token) else None

    def _current(self, token: str) -> Group | None:
        if not self.gave(token):
            raise KeyError(f"lease token {token!r} was never given out by this ledger")
        group = self._table.get(group_of(token))
        return group if group is not None and group.token == token else None

    # --- life of a group -------------------------------------------------------------------------------------------

    def finish(self, token: str, *, version: int | None = None) -> Group | None:
        """Take note that the record of a leased group is stored; `version` is the lowest policy version of its tokens.

        Returns the group; None, and counts it, where `token` is not the current lease of a leased group.
        """
        group = self.current(token)
        if group is None or group.state is not GroupState.LEASED:
            self.counts["late"] += 1
            return None
        self._table.move(group, GroupState.GENERATED)
        if version is not None:
            self._table.set_version(group, version)
        return group

    def requeue(self, token: str, reason: RequeueReason, message: str = "", *, counted: bool = True) -> bool:
        """Make a group pending again; return whether it is (False: nothing to do, or its attempts are used up and it is dropped).

        Takes effect once per token. A generated group is requeued for reason stale or epoch only; the loss of the worker after it
        finished the group changes nothing. `counted` False: uses up no attempt. `message` says why, for a group that is dropped by it.
        Raises ValueError for an unknown reason or a group in another state, KeyError for a token never given out.
        """
        if reason not in self._budgets:
            raise ValueError(f"reason must be one of {sorted(self._budgets)}, got {reason!r}")
        group = self._current(token)
        if group is None or group.state is GroupState.PENDING:
            return False
        if group.state is not GroupState.LEASED:
            if reason == "worker_lost":
                return False
            if reason not in ("stale", "epoch") or group.state is not GroupState.GENERATED:
                raise ValueError(
                    f"group {group.group_id} must be leased to be requeued for {reason}, got state {group.state.value}"
                )
        if reason != "worker_lost":
            group.failures.pop("worker_lost", None)  # losses count in a row: this time the worker answered
        if counted:
            group.failures[reason] = group.failures.get(reason, 0) + 1
        if group.failures.get(reason, 0) >= self._budgets[reason]:
            self._finish(group, GroupState.DROPPED)
            self.consecutive_drops += 1
            self._drops.append(Drop(group_id=group.group_id, reason=reason, message=message))
            return False
        self._table.move(group, GroupState.PENDING)
        self.counts["requeued"] += 1
        return True

    def take_drops(self) -> list[Drop]:
        """Return the groups dropped since the last call, whichever call dropped them."""
        drops, self._drops = self._drops, []
        return drops

    def consume(self, group_ids: Iterable[str], step: int) -> None:
        """Mark generated groups as admitted to training step `step`."""
        for group_id in group_ids:
            group = self._group(group_id)
            if group.state is not GroupState.GENERATED:
                raise ValueError(f"group {group_id} must be generated, got state {group.state.value}")
            group.step = step
            self._table.move(group, GroupState.CONSUMED)

    def acknowledge(self, step: int) -> list[Group]:
        """Mark the groups consumed by `step` as trained; return them in ledger order.

        Raises ValueError when the step holds no consumed group (it was acknowledged before, or never consumed).
        """
        groups = self._table.consumed(step)
        if not groups:
            raise ValueError(
                f"step {step} must hold consumed groups to be acknowledged, got none: acknowledged before or never consumed"
            )
        for group in groups:
            self._finish(group, GroupState.ACKNOWLEDGED)
        self.consecutive_drops = 0
        return groups

    def discard(self, group_ids: Iterable[str], reason: str) -> None:
        """End groups that will not be trained (filtered, scored); `reason` names why in the error text."""
        for group_id in group_ids:
            group = self._group(group_id)
            if group.state not in OUT:
                raise ValueError(
                    f"group {group_id} must be leased or generated to be discarded ({reason}), got state {group.state.value}"
                )
            self._finish(group, GroupState.DISCARDED)

    def _group(self, group_id: str) -> Group:
        """Return an outstanding group. Raises ValueError for one that has ended, KeyError for one never leased."""
        group = self._table.get(group_id)
        if group is not None:
            return group
        position = self._order.position(group_id, end=self._cursor)
        if position is None:
            raise KeyError(f"group {group_id!r} was never leased by this ledger")
        ended = self._final.get(position)
        state = "acknowledged, dropped or discarded" if ended is None else ended.value
        raise ValueError(f"group {group_id} must be outstanding, got state {state}")

    def _finish(self, group: Group, state: GroupState) -> None:
        self._table.remove(group)
        self._final[group.position] = state
        self.counts[state.value] += 1
        while self._low_water in self._final:
            del self._final[self._low_water]
            self._low_water += 1

    # --- views -----------------------------------------------------------------------------------------------------

    def held(self) -> list[HeldGroup]:
        """Return every group that is leased, generated or consumed, in ledger order."""
        now = self._clock()
        groups = [group for group in self._table if group.state is not GroupState.PENDING]
        return [
            HeldGroup(
                group_id=group.group_id,
                state=group.state,
                owner=group.owner,
                seconds=now - group.since,
                attempt=group.leases,
            )
            for group in sorted(groups, key=lambda group: group.position)
        ]

    def running(self) -> list[Group]:
        """Return the groups that rollouts generate, those of the oldest lease version first."""
        return sorted(self._table.leased(), key=lambda group: (group.version, group.position))

    def groups_out(self) -> list[Group]:
        """Return the groups that are leased or generated, in ledger order."""
        return sorted((group for group in self._table if group.state in OUT), key=lambda group: group.position)

    def num_in(self, state: GroupState) -> int:
        """Return the number of outstanding groups in `state`."""
        return self._table.counts[state]

    def num_ahead(self, group: Group) -> int:
        """Return how many groups before this one in the order may still be trained and are not admitted."""
        return self._table.num_ahead(group.position)

    def out(self) -> Mapping[int, int]:
        """Return the numbers of leased and generated groups by version: that of the lease, or the lowest of the generated tokens."""
        return self._table.out

    def metrics(self) -> dict[str, float]:
        """Return `ledger/*`."""
        open_states = (GroupState.PENDING, GroupState.LEASED, GroupState.GENERATED)
        return {
            **{f"ledger/{state.value}": float(self._table.counts[state]) for state in open_states},
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
                for group in self._table
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
            differences = ", ".join(f"{key} {saved} (saved) and {now} (now)" for key, (saved, now) in wrong.items())
            raise ConfigError(
                f"the ledger must be resumed over the same data order, got {differences}; restore them or start afresh"
            )
        self._cursor, self._low_water = int(state["cursor"]), int(state["low_water"])
        self._final = {int(position): GroupState(name) for position, name in state["final_above"].items()}
        self._table = GroupTable(self._clock)
        self._run, self._num_leases = secrets.token_hex(4), 0
        for position in range(self._low_water, self._cursor):
            if position not in self._final:
                before = state["attempts"].get(str(position), {"leases": 0, "failures": {}})
                group = self._new_group(position)
                group.leases, group.failures = int(before["leases"]), dict(before["failures"])
                self._table.add(group)
        self.counts = dict(state["counts"])
        self.consecutive_drops = int(state["consecutive_drops"])


def group_of(token: str) -> str:
    """Return the group id in a lease token."""
    return token.split(".", 2)[-1]
