"""The prompt ledger: the state of every prompt group, who leases it, and which group comes next.

There is one ledger for the training prompts, and one for each validation round. It alone grants leases and decides whether a lease is still
current. Its caller, the dispatcher, serialises the calls.

A group goes pending -> leased -> generated -> consumed (admitted to a step) -> acknowledged (trained). It ends early as dropped (its
attempts are used up) or discarded (filtered out). Only the current lease of a group can finish it, so a group is trained at most once. A
checkpoint stores which groups have ended; all others are pending after a resume, so a resumed run neither skips nor repeats a group.

"Data epoch" means a pass over the data set. "Epoch" alone means the number of gang restarts of the job: a group is requeued for the reason
`epoch` when it was leased before such a restart.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rl_core.api.errors import ConfigError
from rl_core.messages.groups import LeaseMode, PromptLease, RequeueReason
from rl_core.runner.group_table import OUT, Group, GroupState, GroupTable
from rl_core.runner.prompt_order import Dataset, Part, PromptOrder

SEED_REASONS: frozenset[str] = frozenset({"data", "deadline"})
"""Requeue reasons after which the completions are sampled with another seed. After any other, for example a lost worker, the same seed
is used again.
"""


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
    """The item of the data set: the tokenized prompt and its metadata."""
    policy_version: int
    """Version of the weights that the group is to be generated with."""
    seconds: float
    """Seconds for which it runs unless it is renewed."""
    seed_attempt: int = 1
    """1 + number of earlier failures for the reasons `SEED_REASONS`; it selects the seed of the completions (`sample_seed`)."""
    order: int = 0
    """Position in the ledger's order."""

    def message(
        self, mode: LeaseMode, *, num_generations: int, temperature: float | None = None, given: float = 0.0
    ) -> PromptLease:
        """Return the message that the rollout receives.

        `mode` is train or validate, `num_generations` the number of completions, `temperature` that of a validation group (None for the
        job's training temperature), and `given` the runner's clock in seconds when the lease was granted, for the trace.
        """
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
            resumed=self.attempt > 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A group that ended because its attempts for one requeue reason were used up."""

    group_id: str
    reason: RequeueReason
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldGroup:
    """An outstanding group and its owner, for `/status`."""

    group_id: str
    state: GroupState
    owner: str
    """Process that generates it, or has generated it."""
    seconds: float
    """Seconds since it came into this state."""
    attempt: int


class PromptLedger:
    """Leases prompt groups in a seeded order and records the state of each. Not thread-safe."""

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
        parts: Sequence[Part] = (),
    ) -> None:
        """Create a ledger over `dataset`, in a permutation seeded by (seed, data epoch).

        `parts` are the data sets that stand one behind the other in `dataset` and are mixed by weight; none: it is one data set.

        A lease ends `lease_seconds` after it was granted or last renewed. `max_attempts` is the number of failures of one reason at which a
        group is dropped: one number for all reasons, or one for each. Worker losses count only while they are consecutive.

        `data_epochs` is the number of passes over the data set; None means no limit. `prefix` begins every group id. Raises ValueError for
        an empty data set or `max_attempts` below 1.
        """
        if not len(dataset):
            raise ValueError("dataset must hold at least one prompt, got none; check data.train")
        budgets = (
            max_attempts if isinstance(max_attempts, Mapping) else dict.fromkeys(get_args(RequeueReason), max_attempts)
        )
        too_low = {reason: count for reason, count in budgets.items() if count < 1}
        if too_low:
            raise ValueError(f"max_attempts must be at least 1 for each reason, got {too_low}")
        self.dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._lease_seconds = lease_seconds
        self._budgets = dict(budgets)
        self._clock = clock
        self._end_position = None if data_epochs is None else data_epochs * len(dataset)
        self._parts = tuple(parts) or (Part(len(dataset), 1),)
        self._order = PromptOrder(self._parts, seed=seed, shuffle=shuffle, prefix=prefix)
        self._drops: list[Drop] = []
        self._cursor = 0
        self._low_water = 0
        self._table = GroupTable(clock)
        self._final_states: dict[int, GroupState] = {}
        """Final states by position, from `_low_water` on. All groups before `_low_water` have ended."""
        self._num_leases = 0
        """Number of leases granted so far; it is a part of the next token."""
        self._run = secrets.token_hex(4)
        """First part of this ledger's tokens. It is random, so that a record of the run before a resume cannot carry a valid token."""
        self.counts = {"acknowledged": 0, "dropped": 0, "discarded": 0, "requeued": 0, "late": 0}
        self.consecutive_drops = 0

    # --- leases ----------------------------------------------------------------------------------------------------

    def lease(self, count: int, owner: str, *, policy_version: int = 0) -> list[Lease]:
        """Lease up to `count` groups to `owner`: requeued ones first, in the ledger's order, then new ones.

        Returns fewer when the data epochs are used up. Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"count of groups to lease must be at least 0, got {count}")
        leases: list[Lease] = []
        while len(leases) < count and (group := self._table.pop_pending() or self._next()) is not None:
            leases.append(self._issue(group, owner, policy_version))
        return leases

    def _next(self) -> Group | None:
        """Return the next new group; None after the last one."""
        if self._cursor == self._end_position:
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

    def revert_lease(self, token: str) -> None:
        """Make a leased or generated group pending again as if it had not been leased: no attempt is counted.

        Used for a lease that never reached its owner, and for a surplus group that the step does not need.
        """
        group = self._group_by_token(token)
        if group is not None and group.state in OUT:
            group.leases -= 1
            self._table.move(group, GroupState.PENDING)

    def renew(self, tokens: Iterable[str], owner: str) -> list[str]:
        """Extend the leases of `owner` to `lease_seconds` from now; return the tokens that are not (or no longer) its leases."""
        stale = []
        for token in tokens:
            group = self._group_by_token(token) if self.issued(token) else None
            if group is None or group.state is not GroupState.LEASED or group.owner != owner:
                stale.append(token)
            else:
                self._table.renew(group, self._clock() + self._lease_seconds)
        return stale

    def extend_leases(self, seconds: float) -> None:
        """Extend every lease by `seconds`, for which this process was frozen and could not receive renewals."""
        self._table.extend_leases(seconds)

    def requeue_owner(self, owner: str, reason: RequeueReason, message: str = "") -> list[str]:
        """Requeue all groups that `owner` has leased; return the tokens of these leases."""
        tokens = [group.token for group in self._table.held_by(owner)]
        for token in tokens:
            self.requeue(token, reason, message)
        return tokens

    def expire(self) -> list[str]:
        """Requeue the groups whose leases have ended, for the reason worker_lost; return the tokens of these leases."""
        tokens = [group.token for group in self._table.expired(self._clock())]
        for token in tokens:
            self.requeue(token, "worker_lost", "its lease was not renewed")
        return tokens

    def issued(self, token: str) -> bool:
        """Return whether this ledger issued `token`. It is decided by the parts of the token; issued tokens are not stored."""
        run, _, suffix = token.partition(".")
        number, _, group_id = suffix.partition(".")
        return run == self._run and number.isdecimal() and 1 <= int(number) <= self._num_leases and bool(group_id)

    def group_by_token(self, token: str) -> Group | None:
        """Return the outstanding group whose newest lease has this token; None if there is none, or the token is of another ledger."""
        return self._group_by_token(token) if self.issued(token) else None

    def _group_by_token(self, token: str) -> Group | None:
        if not self.issued(token):
            raise KeyError(f"lease token {token!r} was never given out by this ledger")
        group = self._table.get(group_of(token))
        return group if group is not None and group.token == token else None

    # --- life of a group -------------------------------------------------------------------------------------------

    def finish(self, token: str, *, version: int | None = None) -> Group | None:
        """Mark a leased group as generated: its record is stored on the channel.

        `version` is the policy version of its oldest token; None keeps the version of the lease. Returns the group, or None if `token` is
        not the current lease of a leased group; such calls are counted in `ledger/late_total`.
        """
        group = self.group_by_token(token)
        if group is None or group.state is not GroupState.LEASED:
            self.counts["late"] += 1
            return None
        self._table.move(group, GroupState.GENERATED)
        if version is not None:
            self._table.set_version(group, version)
        return group

    def requeue(self, token: str, reason: RequeueReason, message: str = "", *, counted: bool = True) -> bool:
        """Make a group pending again, so that it is leased and generated once more; return whether this call did so.

        Returns False in three cases: the token is not the newest lease of an outstanding group or the group is pending already; the group
        is finished and the reason is worker_lost; or its attempts are used up, so that it is dropped (see `take_drops`). A finished group
        can be requeued for the reasons stale and epoch only.

        `counted` False uses up no attempt. `message` explains a drop. Raises ValueError for an unknown reason or a group in another state,
        KeyError for a token that this ledger never issued.
        """
        if reason not in self._budgets:
            raise ValueError(f"reason must be one of {sorted(self._budgets)}, got {reason!r}")
        group = self._group_by_token(token)
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
            # Only consecutive losses count, and this time the worker has answered.
            group.failures.pop("worker_lost", None)
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
        """Return the groups that were dropped since the last call."""
        drops, self._drops = self._drops, []
        return drops

    def consume(self, group_ids: Iterable[str], step: int) -> None:
        """Mark generated groups as admitted to training step `step`. Raises ValueError for a group in another state."""
        for group_id in group_ids:
            group = self._group(group_id)
            if group.state is not GroupState.GENERATED:
                raise ValueError(f"group {group_id} must be generated, got state {group.state.value}")
            group.step = step
            self._table.move(group, GroupState.CONSUMED)

    def acknowledge(self, step: int) -> list[Group]:
        """Mark the groups that `step` admitted as trained; return them in the ledger's order.

        Raises ValueError if the step has no admitted groups: it was acknowledged before, or no group was ever admitted to it.
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
        """End leased or generated groups without training.

        `reason` only appears in the ValueError that is raised for a group in another state.
        """
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
        outcome = self._final_states.get(position)
        state = "acknowledged, dropped or discarded" if outcome is None else outcome.value
        raise ValueError(f"group {group_id} must be outstanding, got state {state}")

    def _finish(self, group: Group, state: GroupState) -> None:
        self._table.remove(group)
        self._final_states[group.position] = state
        self.counts[state.value] += 1
        while self._low_water in self._final_states:
            del self._final_states[self._low_water]
            self._low_water += 1

    # --- views -----------------------------------------------------------------------------------------------------

    def held(self) -> list[HeldGroup]:
        """Return every group that is leased, generated or consumed, in the ledger's order."""
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

    def leased(self) -> list[Group]:
        """Return the leased groups by ascending version of their lease, then in the ledger's order."""
        return sorted(self._table.leased(), key=lambda group: (group.version, group.position))

    def groups_out(self) -> list[Group]:
        """Return the groups that are leased or generated, in ledger order."""
        return sorted((group for group in self._table if group.state in OUT), key=lambda group: group.position)

    def num_in(self, state: GroupState) -> int:
        """Return the number of outstanding groups in `state`."""
        return self._table.counts[state]

    def num_ahead(self, group: Group) -> int:
        """Return how many groups before this one, in the ledger's order, are pending, leased or generated."""
        return self._table.num_ahead(group.position)

    def num_out_by_version(self) -> Mapping[int, int]:
        """Return the number of leased and generated groups by version: that of the lease, or of the finished group's oldest token."""
        return self._table.out

    def metrics(self) -> dict[str, float]:
        """Return the metrics `ledger/*`: numbers of groups by state, and of requeues and late finishes."""
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
        """Return the state for a checkpoint, as JSON-able values. Groups that have not ended are pending after it is loaded."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self.dataset),
            **self._mixture(),
            "data_epoch": self._cursor // len(self.dataset),
            "cursor": self._cursor,
            "low_water": self._low_water,
            "final_above": {str(position): state.value for position, state in sorted(self._final_states.items())},
            "attempts": {
                str(group.position): {"leases": group.leases, "failures": dict(group.failures)}
                for group in self._table
                if group.failures
            },
            "counts": dict(self.counts),
            "consecutive_drops": self.consecutive_drops,
        }

    def _mixture(self) -> dict[str, Any]:
        """Return the sizes and weights of several data sets for a checkpoint; nothing for one."""
        return {"parts": [list(part) for part in self._parts]} if len(self._parts) > 1 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: all groups that have not ended are pending, in the ledger's order.

        Raises ConfigError, which is a ValueError, if the seed, the shuffling, or size and weight of the data sets differ from the saved ones.
        """
        expected = {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self.dataset),
            "parts": None,
        } | self._mixture()
        mismatches = {key: (state.get(key), value) for key, value in expected.items() if state.get(key) != value}
        if mismatches:
            names = {
                "seed": "algorithm.seed",
                "shuffle": "data.shuffle",
                "size": "prompts in data.train",
                "parts": "data.sets",
            }
            differences = ", ".join(
                f"{names[key]}: {saved} then, {now} now" for key, (saved, now) in mismatches.items()
            )
            raise ConfigError(
                f"a run must be resumed with the prompts that it began with, got {differences}; restore them, or begin a new run in another folder"
            )
        self._cursor, self._low_water = int(state["cursor"]), int(state["low_water"])
        self._final_states = {int(position): GroupState(name) for position, name in state["final_above"].items()}
        self._table = GroupTable(self._clock)
        self._run, self._num_leases = secrets.token_hex(4), 0
        for position in range(self._low_water, self._cursor):
            if position not in self._final_states:
                attempts = state["attempts"].get(str(position), {"leases": 0, "failures": {}})
                group = self._new_group(position)
                group.leases, group.failures = int(attempts["leases"]), dict(attempts["failures"])
                self._table.add(group)
        self.counts = dict(state["counts"])
        self.consecutive_drops = int(state["consecutive_drops"])


def group_of(token: str) -> str:
    """Return the group id in a lease token."""
    return token.split(".", 2)[-1]
