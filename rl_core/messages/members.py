"""What a worker process and the runner's hub say to each other about who is there.

worker     -> hub   hello(HelloReport) -> HelloAccepted | HelloRefused
worker     -> hub   heartbeat(MemberId, Heartbeat) -> HeartbeatAnswer          goodbye(MemberId)
supervisor -> hub   child_ended(MemberId, code)

The records are tolerant: a peer of a newer release may add fields with defaults. What older peers cannot do without, or read
otherwise, raises WIRE_VERSION instead.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal

from rl_core.messages.registry import record

WIRE_VERSION = 2
"""Raised when messages between processes change incompatibly; a hello of another version is refused."""
Incarnation = tuple[int, int]
"""(attempt of the pod, restarts of the child); the higher one replaces the lower one of the same name."""
RefusalReason = Literal["wrong_job", "wire_version", "older_epoch", "newer_epoch", "duplicate_rank"]
"""older_epoch and newer_epoch say how the member's epoch compares with the hub's."""


class MemberState(StrEnum):
    """JOINING -> CONSTRUCTING -> READY -> UPDATING <-> SERVING -> DRAINING -> DRAINED; SUSPECT and LOST by silence or a child's end."""

    JOINING = "joining"
    """Said hello; holds no worker object."""
    CONSTRUCTING = "constructing"
    """Builds its worker object, or an engine for it in the place of one that was lost."""
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

    @property
    def visible(self) -> "MemberState":
        """Return the state that other members see: READY for every state in which the member takes calls.

        A weight sync moves each rollout between UPDATING and SERVING. Nobody who calls a rollout needs to know, so nothing is sent.
        """
        return MemberState.READY if self.constructed else self


@record
class MemberId:
    """One process of a member: a restarted one has the name of the old and a higher incarnation."""

    wire_tolerant = True
    name: str
    """`group:rank`."""
    incarnation: Incarnation


@record
class MemberView:
    """What the members that may call a member know of it."""

    wire_tolerant = True
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
    incarnation: Incarnation
    world_size: int = 1
    """Planned size of its group. An elastic group may have more or fewer members."""
    state: MemberState = MemberState.JOINING
    """Its state as `MemberState.visible` gives it."""

    def __post_init__(self) -> None:
        _revive_state(self)


@record
class View:
    """The members that changed since the receiver's last view. Members that are gone are included.

    A receiver gets only members of the groups that it may call.
    """

    wire_tolerant = True
    version: int
    """Sequence number of the last change. The receiver sends it back with its heartbeats and gets what changed after it."""
    members: list[MemberView]


@record
class HelloReport:
    """A process asks to be a member."""

    wire_tolerant = True
    wire_version: int
    uid: str
    """Unique id of the job it belongs to."""
    epoch: int
    member: MemberView
    """The process as the others will see it."""
    registration: int
    """Counts the registrations of this process from 1: a hello sent again because its answer was late repeats the number."""
    device_uuids: tuple[str, ...] = ()
    python: str = ""
    """Version of its interpreter, for the log."""


@record
class HelloAccepted:
    """The hub took the process in."""

    wire_tolerant = True
    heartbeat_seconds: float
    """How often to send heartbeats."""
    view: View
    job: str | None
    """The job as JSON; None for a hub without one."""
    files: dict[str, bytes]
    """Model configuration and tokenizer by file name; empty for envs."""


@record
class HelloRefused:
    """The hub did not take the process in."""

    wire_tolerant = True
    reason: RefusalReason
    epoch: int
    """Epoch of the hub: with reason older_epoch the one to start over at."""


class WaitCause(StrEnum):
    """What a worker waits for, where the member that it waits for does not say it."""

    CHANNEL_FULL = "channel_full"
    WEIGHTS = "weights"


@record
class DeclaredWait:
    """A worker waits and reports it. The cause of a stall is where a chain of such waits ends."""

    wire_tolerant = True
    what: str
    on: str
    """Member, role or channel."""
    since_seconds: float
    """How long it had waited when it reported the wait."""
    cause: WaitCause | None = None

    def __post_init__(self) -> None:
        if self.cause is not None:  # an enum travels as its text
            object.__setattr__(self, "cause", WaitCause(self.cause))


@record
class Heartbeat:
    """A sign of life, with all that the hub knows of a member beyond its hello."""

    wire_tolerant = True
    state: MemberState
    policy_version: int | None = None
    digest: str | None = None
    weights_proof: str = ""
    """What proves that its engine holds them: its own tensors, or what it makes of a fixed prompt; "" = it holds none."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """Counters by kind since the process started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Gauges and counters of the worker by name."""
    wait: DeclaredWait | None = None
    """The oldest of its declared waits."""
    memory_bytes: int = 0
    """Resident memory."""
    view_version: int = -1
    """Version of the last view it took in; -1 = none."""

    def __post_init__(self) -> None:
        _revive_state(self)


@record
class HeartbeatAnswer:
    """What the hub answers to a heartbeat."""

    wire_tolerant = True
    known: bool
    """False: the hub does not count the process as a member; it must say hello again."""
    view: View | None = None
    """None: nothing changed since the heartbeat's `view_version`."""
    num_serving: int = 0
    """Members of the sender's group that are in the state SERVING."""


def _revive_state(message: Any) -> None:
    """Make the state an enum member again: it travels as its text."""
    object.__setattr__(message, "state", MemberState(message.state))
