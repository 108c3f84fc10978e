"""One worker process as the hub sees it: what every process knows of it, and what only the hub knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from rl_core.messages.members import DeclaredWait, HelloReport, MemberId, MemberView


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(MemberView):
    """One state of a member. A change makes a new object."""

    policy_version: int | None = None
    digest: str | None = None
    """Content digest of the weights that it holds."""
    registration: int = 0
    """Counts the registrations of its process from 1."""
    device_uuids: tuple[str, ...] = ()
    weights_proof: str = ""
    progress: Mapping[str, float] = field(default_factory=dict)
    """Counters by kind since the process started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    wait: DeclaredWait | None = None
    memory_bytes: int = 0
    last_seen: float = 0.0
    """Hub clock, seconds."""
    reason: str = ""
    """Why it is lost."""
    host: str = ""
    """IP address from which it registered; "" when it is not known."""

    @classmethod
    def from_hello(cls, report: HelloReport, now: float, host: str = "") -> Self:
        """Return the member that said hello with `report` at `now`, from the IP address `host`."""
        seen = {name: getattr(report.member, name) for name in _VIEWED}
        return cls(**seen, registration=report.registration, device_uuids=report.device_uuids, last_seen=now, host=host)

    @property
    def id(self) -> MemberId:
        """The process that is the member."""
        return MemberId(name=self.name, incarnation=self.incarnation)

    @property
    def view(self) -> MemberView:
        """What members of other groups see of it."""
        return MemberView(**{name: getattr(self, name) for name in _VIEWED} | {"state": self.state.visible})


_VIEWED = tuple(field.name for field in fields(MemberView))
