"""Who is in the job: the state machine behind the hub (runtime.md 3.4). Pure: no threads, no sockets, the clock is injected.

    hello --accepted--> JOINING -> ... -> SERVING --silence suspect--> SUSPECT --silence lost--> LOST
      |                                    |  ^___heartbeat____________|          ^
      +--refused                           +--child_ended (its supervisor saw it end)

Every message of a member carries its incarnation; one older than the registered one is fenced. Changes that others must
hear of (joined, lost) collect in order and are taken by the hub.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_core.api.errors import EpochFenced
from rl_core.workers.member import WIRE_VERSION, Member, MemberState


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened to a member."""

    kind: Literal["joined", "lost"]
    member: Member
    reason: str = ""


class Membership:
    """Members by name, each with the time it was last heard of."""

    def __init__(
        self,
        *,
        uid: str,
        epoch: int,
        suspect_seconds: float = 6.0,
        lost_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uid = uid
        self.epoch = epoch
        self.version = 0
        """Rises with every change that other members see."""
        self.refused: dict[str, int] = {}
        """Refusals by reason."""
        self._suspect = suspect_seconds
        self._lost = lost_seconds
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._changed_at: dict[str, int] = {}
        self._changes: list[Change] = []
        self._last_sweep = clock()

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def get(self, name: str) -> Member | None:
        """Return the member called `group:rank`, gone or not; None when it was never seen."""
        return self._members.get(name)

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members of `role` (all when None) that are not gone, by group and rank; with `drained`, `lost` those too."""
        kept = [*([MemberState.DRAINED] if drained else []), *([MemberState.LOST] if lost else [])]
        found = [m for m in self._members.values() if role in (None, m.role) and (not m.state.gone or m.state in kept)]
        return sorted(found, key=lambda m: (m.group, m.rank))

    def hello(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Register a process; return `{"accepted": True, "epoch", "view"}` or a refusal with reason and the right epoch."""
        reason = self._judge(report)
        if reason is not None:
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return {"accepted": False, "reason": reason, "epoch": self.epoch}
        member = Member.from_hello(report, self._clock())
        old = self._members.get(member.name)
        if old is not None and _repeated(old, member):
            self._members[member.name] = replace(old, last_seen=member.last_seen)
            return {"accepted": True, "epoch": self.epoch, "view": self.view()}
        if old is not None and not old.state.gone:
            said = (
                "it said hello again"
                if old.incarnation == member.incarnation
                else f"replaced by incarnation {_dotted(member)}"
            )
            self._lose(old, said)
        self._put(member)
        self._changes.append(Change("joined", member))
        return {"accepted": True, "epoch": self.epoch, "view": self.view()}

    def heartbeat(self, name: str, incarnation: tuple[int, int], report: Mapping[str, Any]) -> dict[str, Any]:
        """Note a sign of life; return `{"epoch", "view"?}`, or `{"epoch", "refused": "unknown"}` when it must say hello again.

        Raises EpochFenced when a higher incarnation has taken the name.
        """
        member = self._members.get(name)
        if member is not None and incarnation < member.incarnation:
            raise EpochFenced(
                f"{name} incarnation {incarnation[0]}.{incarnation[1]} was replaced by {_dotted(member)}; this process must end"
            )
        rests = (
            member is not None and member.state is MemberState.DRAINED and report.get("state") == MemberState.DRAINED
        )
        if member is None or incarnation != member.incarnation or (member.state.gone and not rests):
            return {"epoch": self.epoch, "refused": "unknown"}
        if report.get("state") == MemberState.DRAINED and not rests:
            self._lose(member, "it drained", state=MemberState.DRAINED)
            member = self._members[name]
        member = replace(
            member,
            state=MemberState(report.get("state", member.state)),
            policy_version=report.get("policy_version", member.policy_version),
            digest=report.get("digest", member.digest),
            progress=report.get("progress", member.progress),
            wait=report.get("wait"),
            memory_bytes=report.get("memory_bytes", member.memory_bytes),
            metrics=report.get("metrics", member.metrics),
            last_seen=self._clock(),
        )
        self._put(member)
        answer: dict[str, Any] = {"epoch": self.epoch}
        known = report.get("view_version", -1)
        if known != self.version:
            answer["view"] = self.view(since=known)
        return answer

    def child_ended(self, name: str, incarnation: tuple[int, int], code: int) -> None:
        """Note that the supervisor of `name` saw that incarnation end; older ones are no news."""
        self.give_up(name, incarnation, f"its process ended with code {code}")

    def give_up(self, name: str, incarnation: tuple[int, int], reason: str) -> None:
        """Take a member for lost although it lives: its next heartbeat is refused, and it says hello again."""
        member = self._members.get(name)
        if member is not None and not member.state.gone and member.incarnation == incarnation:
            self._lose(member, reason)

    def goodbye(self, name: str, incarnation: tuple[int, int]) -> None:
        """Note that a member drained and leaves."""
        member = self._members.get(name)
        if member is not None and not member.state.gone and member.incarnation == incarnation:
            self._lose(member, "it drained and said goodbye", state=MemberState.DRAINED)

    def sweep(self) -> None:
        """Judge silence; called every half second or so. A pause of this process itself is not counted as silence of others."""
        now = self._clock()
        pause = now - self._last_sweep
        self._last_sweep = now
        for member in self.members():
            if pause > self._suspect / 2:
                self._members[member.name] = replace(member, last_seen=member.last_seen + pause)
                continue
            silence = now - member.last_seen
            if silence > self._lost:
                self._lose(member, f"no heartbeat for {silence:.1f} s")
            elif silence > self._suspect and member.state is not MemberState.SUSPECT:
                self._put(replace(member, state=MemberState.SUSPECT))

    def view(self, since: int = -1) -> dict[str, Any]:
        """Return `{"version", "members": [...]}` of the members that changed after view version `since`, gone ones included."""
        changed = [member.to_view() for name, member in self._members.items() if self._changed_at[name] > since]
        return {"version": self.version, "members": changed}

    def take_changes(self) -> list[Change]:
        """Return what happened since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken

    def _judge(self, report: Mapping[str, Any]) -> str | None:
        if report.get("uid") != self.uid:
            return "wrong_job"
        if report.get("wire_version") != WIRE_VERSION:
            return "wire_version"
        if report["epoch"] < self.epoch:
            return "older_epoch"
        if report["epoch"] > self.epoch:
            return "newer_epoch"
        known = self._members.get(f"{report['group']}:{report['rank']}")
        if known is None:
            return None
        offered = (int(report["incarnation"][0]), int(report["incarnation"][1]))
        same_process = (known.pid, known.pod, known.address) == (report["pid"], report["pod"], report["address"])
        taken = offered == known.incarnation and not same_process and not known.state.gone
        return "duplicate_rank" if offered < known.incarnation or taken else None

    def _lose(self, member: Member, reason: str, *, state: MemberState = MemberState.LOST) -> None:
        member = replace(member, state=state, reason=reason)
        self._put(member)
        self._changes.append(Change("lost", member, reason))

    def _put(self, member: Member) -> None:
        old = self._members.get(member.name)
        self._members[member.name] = member
        if old is None or old.to_view() != member.to_view():
            self.version += 1
            self._changed_at[member.name] = self.version


def _repeated(old: Member, new: Member) -> bool:
    """Return whether a hello was said again because its answer was late: the process has not started over in between."""
    same = (old.incarnation, old.registration) == (new.incarnation, new.registration)
    return same and new.registration > 0 and not old.state.gone


def _dotted(member: Member) -> str:
    return f"{member.incarnation[0]}.{member.incarnation[1]}"
