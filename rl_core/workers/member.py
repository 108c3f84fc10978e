"""The record that the hub keeps of one worker process. MemberView is the part that other members see."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from rl_core.messages.members import DeclaredWait, HelloReport, MemberId, MemberView


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(MemberView):
    """An immutable snapshot of one member. Each change creates a new object.

    The fields that it shares with MemberView are described there.
    """

    policy_version: int | None = None
    """Version of the policy weights that the member holds. None when it holds none."""
    digest: str | None = None
    """Content digest of these weights. None when it holds none."""
    registration: int = 0
    """Counts the registrations of the process from 1."""
    device_uuids: tuple[str, ...] = ()
    """UUIDs of the accelerators that the process uses."""
    weights_proof: str = ""
    """How the member verified its weights after loading them. Empty when it did not."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """Progress counters by kind since the process started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Latest value of each gauge."""
    wait: DeclaredWait | None = None
    """The longest wait that the member has declared. None when it waits for nothing."""
    memory_bytes: int = 0
    """Resident memory of the process in bytes."""
    last_seen: float = 0.0
    """Time of its last message on the hub's clock, in seconds."""
    reason: str = ""
    """Why the member is lost or drained. Empty while it is present."""
    host: str = ""
    """IP address from which the member registered. Empty when it is not known."""

    @classmethod
    def from_hello(cls, report: HelloReport, now: float, host: str = "") -> Self:
        """Return the member that registered with `report` at the time `now`, from the IP address `host`."""
        viewed = {name: getattr(report.member, name) for name in _VIEWED}
        return cls(
            **viewed, registration=report.registration, device_uuids=report.device_uuids, last_seen=now, host=host
        )

    @property
    def id(self) -> MemberId:
        """Name and incarnation of the member's process."""
        return MemberId(name=self.name, incarnation=self.incarnation)

    @property
    def view(self) -> MemberView:
        """The part of this record that members of other groups see."""
        return MemberView(**{name: getattr(self, name) for name in _VIEWED} | {"state": self.state.visible})


_VIEWED = tuple(field.name for field in fields(MemberView))
