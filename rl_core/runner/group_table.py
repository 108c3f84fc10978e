"""The table of outstanding prompt groups: every group of the ledger that has not ended, with its state and its lease.

Each change of state also updates the indexes by state, owner, version and expiry, so that no query has to walk all groups. The ledger is
the only caller.
"""

import bisect
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class GroupState(StrEnum):
    """PENDING -> LEASED -> GENERATED -> CONSUMED -> ACKNOWLEDGED, or DROPPED, or DISCARDED.

    GENERATED: the rollout has finished the group and its record is stored; no rollout has to answer for it any more.
    CONSUMED: a training step has admitted it.
    """

    PENDING = "pending"
    LEASED = "leased"
    GENERATED = "generated"
    CONSUMED = "consumed"
    ACKNOWLEDGED = "acknowledged"
    DROPPED = "dropped"
    DISCARDED = "discarded"


OUT = frozenset({GroupState.LEASED, GroupState.GENERATED})
"""States of a group that is being generated, or that is finished and deferred."""
OPEN = OUT | {GroupState.PENDING}
"""States of a group that may still be trained and that no step has admitted."""


@dataclass(slots=True, eq=False)
class Group:
    """One outstanding prompt group."""

    group_id: str
    position: int
    """Position in the ledger's order."""
    index: int
    """Index of its prompt in the data set."""
    state: GroupState = GroupState.PENDING
    since: float = 0.0
    """Time on the runner's clock, in seconds, at which it entered this state."""
    token: str = ""
    """Token of its newest lease."""
    owner: str = ""
    """Process that holds or held the newest lease, as `dispatcher.owner_name` writes it; empty while the group is pending."""
    version: int = 0
    """Policy version of the lease; once the group is generated, the version of its oldest token."""
    expires: float = 0.0
    leases: int = 0
    """Number of leases so far."""
    step: int = -1
    """Training step that admitted it."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failures by requeue reason."""


class GroupTable:
    """Outstanding groups by id, by state, by owner, by expiry and in ledger order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._pending: list[tuple[int, str]] = []
        """Heap of the pending groups: (position, group id)."""
        self._open: list[int] = []
        """Sorted positions of the groups in a state of `OPEN`."""
        self._leased: OrderedDict[str, Group] = OrderedDict()
        """Leased groups by group id. The group whose lease ends first comes first."""
        self._by_owner: dict[str, dict[str, Group]] = {}
        """Leased groups by owner and group id."""
        self._by_step: dict[int, dict[str, Group]] = {}
        """Consumed groups by training step and group id."""
        self.counts: Counter[GroupState] = Counter()
        """Number of outstanding groups by state."""
        self.out: Counter[int] = Counter()
        """Number of groups in a state of `OUT`, by version."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def get(self, group_id: str) -> Group | None:
        """Return an outstanding group, None for any other id."""
        return self._groups.get(group_id)

    def add(self, group: Group) -> None:
        """Add a new group, which is pending."""
        self._groups[group.group_id] = group
        self._enter(group)

    def move(self, group: Group, state: GroupState) -> None:
        """Change the state of a group."""
        self._leave(group)
        group.state, group.since = state, self._clock()
        if state is GroupState.PENDING:
            group.owner = ""
        self._enter(group)

    def remove(self, group: Group) -> None:
        """Remove a group that has ended."""
        self._leave(group)
        del self._groups[group.group_id]

    def set_version(self, group: Group, version: int) -> None:
        """Set the version by which a group is counted."""
        self._count_out(group, -1)
        group.version = version
        self._count_out(group, 1)

    def pop_pending(self) -> Group | None:
        """Return the first pending group in ledger order, which the caller leases at once; None when no group is pending."""
        return self._groups[heapq.heappop(self._pending)[1]] if self._pending else None

    def num_ahead(self, position: int) -> int:
        """Return how many groups before `position` are pending, leased or generated."""
        return bisect.bisect_left(self._open, position)

    def held_by(self, owner: str) -> list[Group]:
        """Return the groups that `owner` holds leases of."""
        return list(self._by_owner.get(owner, {}).values())

    def leased(self) -> list[Group]:
        """Return all leased groups."""
        return list(self._leased.values())

    def consumed(self, step: int) -> list[Group]:
        """Return the groups that `step` admitted, in ledger order."""
        return sorted(self._by_step.get(step, {}).values(), key=lambda group: group.position)

    def renew(self, group: Group, expires: float) -> None:
        """Let the lease of a leased group end at clock time `expires`, which must not be earlier than the end of any other lease."""
        group.expires = expires
        self._leased.move_to_end(group.group_id)

    def extend_leases(self, seconds: float) -> None:
        """Extend every lease by `seconds`."""
        for group in self._leased.values():
            group.expires += seconds

    def expired(self, now: float) -> list[Group]:
        """Return the groups whose leases ended at clock time `now` or before."""
        groups = []
        for group in self._leased.values():
            if group.expires > now:
                break
            groups.append(group)
        return groups

    def _enter(self, group: Group) -> None:
        state = group.state
        self.counts[state] += 1
        self._count_out(group, 1)
        if state is GroupState.PENDING:
            heapq.heappush(self._pending, (group.position, group.group_id))
        elif state is GroupState.LEASED:
            self._leased[group.group_id] = group
            self._by_owner.setdefault(group.owner, {})[group.group_id] = group
        elif state is GroupState.CONSUMED:
            self._by_step.setdefault(group.step, {})[group.group_id] = group
        if state in OPEN:
            index = bisect.bisect_left(self._open, group.position)
            if index == len(self._open) or self._open[index] != group.position:
                self._open.insert(index, group.position)

    def _leave(self, group: Group) -> None:
        state = group.state
        self.counts[state] -= 1
        self._count_out(group, -1)
        if state is GroupState.LEASED:
            del self._leased[group.group_id]
            owned = self._by_owner[group.owner]
            del owned[group.group_id]
            if not owned:
                del self._by_owner[group.owner]
        elif state is GroupState.CONSUMED:
            of_step = self._by_step[group.step]
            del of_step[group.group_id]
            if not of_step:
                del self._by_step[group.step]
        if state in OPEN:
            del self._open[bisect.bisect_left(self._open, group.position)]

    def _count_out(self, group: Group, change: int) -> None:
        if group.state in OUT:
            self.out[group.version] += change
            if not self.out[group.version]:
                del self.out[group.version]
