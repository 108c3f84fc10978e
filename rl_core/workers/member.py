"""One worker process as the hub sees it; the same record travels to the workers as part of their view."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WIRE_VERSION = 1
"""Raised when messages between processes change incompatibly; a hello of another version is refused."""


class MemberState(StrEnum):
    """JOINING -> CONSTRUCTING -> READY -> UPDATING <-> SERVING -> DRAINING -> DRAINED; SUSPECT and LOST by silence or a child's end."""

    JOINING = "joining"
    """Said hello; holds no worker object."""
    CONSTRUCTING = "constructing"
    """Builds its worker object."""
    READY = "ready"
    """Takes method calls."""
    UPDATING = "updating"
    """Receives weights; gets no work."""
    SERVING = "serving"
    """Works."""
    DRAINING = "draining"
    """Finishes or returns its work before it ends."""
    DRAINED = "drained"
    """Holds no work and gets none; rests until its pod is deleted, or has said goodbye."""
    SUSPECT = "suspect"
    """Silent; gets no new work."""
    LOST = "lost"
    """Gone."""

    @property
    def gone(self) -> bool:
        """Return whether the process does not come back under this incarnation."""
        return self in (MemberState.LOST, MemberState.DRAINED)

    @property
    def constructed(self) -> bool:
        """Return whether the member holds a worker object and takes calls."""
        return self in (MemberState.READY, MemberState.UPDATING, MemberState.SERVING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A snapshot; changes make a new one."""

    name: str
    """`group:rank`."""
    role: str
    group: str
    rank: int
    pod: str
    address: str
    """Address of the member's RPC server."""
    pid: int
    host_token: str
    """Equal for processes that share /dev/shm."""
    incarnation: tuple[int, int]
    """(attempt of the pod, restarts of the child)."""
    registration: int = 0
    """Counts the registrations of its process from 1; one hello may be said several times. 0 = not told."""
    world_size: int = 1
    """Planned size of its group; for elastic roles the live set is the truth."""
    state: MemberState = MemberState.JOINING
    policy_version: int | None = None
    digest: str | None = None
    """Content digest of the weights it holds."""
    device_uuids: tuple[str, ...] = ()
    progress: Mapping[str, float] = field(default_factory=dict)
    """Counters by kind since the process started."""
    wait: Mapping[str, Any] | None = None
    """What it waits for: {what, on, since_seconds}."""
    memory_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    last_seen: float = 0.0
    """Hub clock, seconds."""
    reason: str = ""
    """Why it is lost."""

    @classmethod
    def from_hello(cls, report: Mapping[str, Any], now: float) -> "Member":
        """Return the member that said hello with `report` at `now`."""
        return cls(
            name=f"{report['group']}:{report['rank']}",
            role=report["role"],
            group=report["group"],
            rank=report["rank"],
            pod=report["pod"],
            address=report["address"],
            pid=report["pid"],
            host_token=report.get("host_token", ""),
            incarnation=(int(report["incarnation"][0]), int(report["incarnation"][1])),
            registration=report.get("registration", 0),
            world_size=report.get("world_size", 1),
            state=MemberState(report.get("state", MemberState.JOINING)),
            device_uuids=tuple(report.get("device_uuids", ())),
            last_seen=now,
        )

    def to_view(self) -> dict[str, Any]:
        """Return what other workers see of it, as plain values."""
        return {
            "name": self.name,
            "role": self.role,
            "group": self.group,
            "rank": self.rank,
            "pod": self.pod,
            "address": self.address,
            "pid": self.pid,
            "host_token": self.host_token,
            "incarnation": list(self.incarnation),
            "world_size": self.world_size,
            "state": self.state.value,
            "policy_version": self.policy_version,
            "digest": self.digest,
        }

    @classmethod
    def from_view(cls, view: Mapping[str, Any]) -> "Member":
        """Return the member described by `to_view`."""
        return cls(**{**view, "incarnation": tuple(view["incarnation"]), "state": MemberState(view["state"])})
