"""The members of a job and their states, as the hub keeps them. Pure: no threads, no sockets, and the clock is an argument.

    hello --accepted--> JOINING -> ... -> SERVING --silence suspect--> SUSPECT --silence lost--> LOST
      |                                    |  ^___heartbeat____________|          ^
      +--refused                           +--child_ended (its supervisor saw it end)

Every message of a member carries its incarnation, which rises when its process or pod is restarted; a message of an older incarnation than
the registered one is refused. Joins and losses are collected in order until the hub takes them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Literal

from rl_core.api.errors import EpochFenced
from rl_core.messages.members import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatAnswer,
    HelloReport,
    Incarnation,
    MemberId,
    MemberState,
    RefusalReason,
    View,
)
from rl_core.workers.member import Member


@dataclass(frozen=True, slots=True)
class Change:
    """A member that has joined, or that is lost or has drained.

    `kind` is "joined" or "lost"; a member that has drained also counts as lost, with the state DRAINED. `member` is its snapshot after the
    change, and `reason` says why it is lost.
    """

    kind: Literal["joined", "lost"]
    member: Member
    reason: str = ""


class Membership:
    """The members of one job by name, with their states."""

    def __init__(
        self,
        *,
        uid: str,
        epoch: int,
        suspect_seconds: float = 6.0,
        lost_seconds: float = 15.0,
        views: Mapping[str, Set[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without members.

        - `uid`, `epoch`: job and epoch that a member must have to be accepted.
        - `suspect_seconds`, `lost_seconds`: silence after which a member is suspect, and lost.
        - `views`: for each group, the groups whose members it sees. A group that is not listed sees none. None: each group sees all.
        - `clock`: returns seconds.
        """
        self.uid = uid
        self.epoch = epoch
        self.revision = 0
        """Number that rises with every change of a member's state or policy version and with every join and loss."""
        self._suspect = suspect_seconds
        self._lost_seconds = lost_seconds
        self._views = views
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._view_version = 0
        """Rises with every change that other members see."""
        self._shown_at: dict[str, dict[str, int]] = {}
        """By group and member: view version of the member's last change, in ascending order."""
        self._serving: Counter[str] = Counter()
        """Number of members in the state SERVING, by group."""
        self._changes: list[Change] = []
        self._last_sweep = clock()

    def get(self, name: str) -> Member | None:
        """Return the member `group:rank`, even if it is lost or has drained. None if it has never registered."""
        return self._members.get(name)

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members of `role` ordered by group and rank. `role` None returns the members of all roles.

        Members that are lost or have drained are left out unless `lost` or `drained` is true.
        """
        states = [*([MemberState.DRAINED] if drained else []), *([MemberState.LOST] if lost else [])]
        selected = [
            m for m in self._members.values() if role in (None, m.role) and (not m.state.gone or m.state in states)
        ]
        return sorted(selected, key=lambda m: (m.group, m.rank))

    def hello(self, report: HelloReport, host: str = "") -> RefusalReason | None:
        """Register a process that connected from IP address `host`. Returns why it is refused, or None when it is accepted."""
        refusal = self._judge(report)
        if refusal is not None:
            return refusal
        member = Member.from_hello(report, self._clock(), host)
        old = self._members.get(member.name)
        if old is not None and _repeated(old, member):
            self._members[member.name] = replace(old, last_seen=member.last_seen, host=host)
            return None
        if old is not None and not old.state.gone:
            same_process = old.incarnation == member.incarnation
            reason = "it said hello again" if same_process else f"replaced by incarnation {_dotted(member.incarnation)}"
            self._lose(old, reason)
        self._store(member)
        self._changes.append(Change("joined", member))
        return None

    def heartbeat(self, sender: MemberId, beat: Heartbeat) -> HeartbeatAnswer:
        """Record a heartbeat and return the answer, whose `known` is false when the member must register again.

        Raises EpochFenced when a process of a higher incarnation has taken over the name.
        """
        member = self._members.get(sender.name)
        if member is not None and sender.incarnation < member.incarnation:
            raise EpochFenced(
                f"{sender.name} incarnation {_dotted(sender.incarnation)} was replaced by "
                f"{_dotted(member.incarnation)}; this process must end"
            )
        drained = beat.state is MemberState.DRAINED
        already_drained = member is not None and member.state is MemberState.DRAINED and drained
        if member is None or sender != member.id or (member.state.gone and not already_drained):
            return HeartbeatAnswer(known=False)
        if drained and not already_drained:
            member = self._lose(member, "it drained", state=MemberState.DRAINED)
        self._store(
            replace(
                member,
                state=beat.state,
                policy_version=beat.policy_version,
                digest=beat.digest,
                weights_proof=beat.weights_proof,
                progress=beat.progress,
                metrics=beat.metrics,
                wait=beat.wait,
                memory_bytes=beat.memory_bytes,
                last_seen=self._clock(),
            )
        )
        return HeartbeatAnswer(
            known=True, view=self._update(member.group, beat.view_version), num_serving=self._serving[member.group]
        )

    def child_ended(self, child: MemberId, code: int) -> None:
        """Declare a member lost because its process ended with exit code `code`. Ignored if a newer process has the same name."""
        self.declare_lost(child, f"its process ended with code {code}")

    def declare_lost(self, member_id: MemberId, reason: str) -> None:
        """Declare a member lost although it sends heartbeats. Its next heartbeat is refused, and it registers again."""
        if (member := self._present(member_id)) is not None:
            self._lose(member, reason)

    def goodbye(self, leaving: MemberId) -> None:
        """Record that a member has drained and is about to end."""
        if (member := self._present(leaving)) is not None:
            self._lose(member, "it drained and said goodbye", state=MemberState.DRAINED)

    def sweep(self) -> None:
        """Mark silent members as suspect or lost. The hub calls this about every half second.

        A much longer gap between two calls means that this process was paused. It does not count as silence of the members.
        """
        now = self._clock()
        pause = now - self._last_sweep
        self._last_sweep = now
        for member in self.members():
            if pause > self._suspect / 2:
                self._members[member.name] = replace(member, last_seen=member.last_seen + pause)
                continue
            silence = now - member.last_seen
            if silence > self._lost_seconds:
                self._lose(member, f"no heartbeat for {silence:.1f} s")
            elif silence > self._suspect and member.state is not MemberState.SUSPECT:
                self._store(replace(member, state=MemberState.SUSPECT))

    def view(self, group: str | None = None, since: int = -1) -> View:
        """Return the members that `group` sees (None: all) and that changed after view version `since`."""
        changed: list[tuple[int, str]] = []
        for visible_group in self._seen_by(group):
            for name, version in reversed(self._shown_at.get(visible_group, {}).items()):
                if version <= since:
                    break
                changed.append((version, name))
        return View(version=self._view_version, members=[self._members[name].view for _, name in sorted(changed)])

    def take_changes(self) -> list[Change]:
        """Return the joins and losses since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _judge(self, report: HelloReport) -> RefusalReason | None:
        if report.uid != self.uid:
            return "wrong_job"
        if report.wire_version != WIRE_VERSION:
            return "wire_version"
        if report.epoch != self.epoch:
            return "older_epoch" if report.epoch < self.epoch else "newer_epoch"
        offered = report.member
        current = self._members.get(offered.name)
        if current is None:
            return None
        same_process = (current.pid, current.pod, current.address) == (offered.pid, offered.pod, offered.address)
        is_duplicate = offered.incarnation == current.incarnation and not same_process and not current.state.gone
        return "duplicate_rank" if offered.incarnation < current.incarnation or is_duplicate else None

    def _present(self, member_id: MemberId) -> Member | None:
        """Return the member `member_id`; None when it is lost or drained, or when another process has its name."""
        member = self._members.get(member_id.name)
        return None if member is None or member.state.gone or member.id != member_id else member

    def _lose(self, member: Member, reason: str, *, state: MemberState = MemberState.LOST) -> Member:
        member = replace(member, state=state, reason=reason)
        self._store(member)
        self._changes.append(Change("lost", member, reason))
        return member

    def _update(self, group: str, since: int) -> View | None:
        """Return the changes of members that `group` sees, after view version `since`; None if there are none.

        If this hub never had the version `since`, the version is of another hub, and all members are returned.
        """
        if since > self._view_version:
            since = -1
        last_version = max(
            (
                next(reversed(versions.values()))
                for visible_group in self._seen_by(group)
                if (versions := self._shown_at.get(visible_group))
            ),
            default=-1,
        )
        return self.view(group, since) if last_version > since else None

    def _seen_by(self, group: str | None) -> Iterable[str]:
        return self._shown_at if group is None or self._views is None else self._views.get(group, ())

    def _store(self, member: Member) -> None:
        old = self._members.get(member.name)
        self._members[member.name] = member
        state, old_state = member.state, old.state if old is not None else None
        if state is not old_state:
            self._serving[member.group] += (state is MemberState.SERVING) - (old_state is MemberState.SERVING)
        joined = old is None or (old.id, old.registration, old.address) != (
            member.id,
            member.registration,
            member.address,
        )
        is_shown = joined or old is None or old.state.visible is not state.visible
        if is_shown:
            self._view_version += 1
            versions = self._shown_at.setdefault(member.group, {})
            versions.pop(member.name, None)
            versions[member.name] = self._view_version
        if (
            is_shown
            or old is None
            or (old.state, old.policy_version, old.digest) != (state, member.policy_version, member.digest)
        ):
            self.revision += 1


def _repeated(old: Member, new: Member) -> bool:
    """Return whether a hello is a repetition: its process got no answer to the first one in time, and has not started over since."""
    same_process = (old.id, old.registration) == (new.id, new.registration)
    return same_process and new.registration > 0 and not old.state.gone


def _dotted(incarnation: Incarnation) -> str:
    return f"{incarnation[0]}.{incarnation[1]}"
