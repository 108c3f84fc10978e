"""The messages between worker processes, their supervisors and the runner's hub.

worker     -> hub   hello(HelloReport) -> HelloAccepted | HelloRefused
worker     -> hub   heartbeat(MemberId, Heartbeat) -> HeartbeatAnswer          goodbye(MemberId)
supervisor -> hub   child_ended(MemberId, code)

Unknown fields are ignored, so a newer release may add fields that have defaults. A change that older peers cannot read, or would misread,
increments WIRE_VERSION.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal

from rl_core.messages.registry import record

WIRE_VERSION = 2
"""Version of the messages between processes. It rises with incompatible changes; a hello of another version is refused."""
Incarnation = tuple[int, int]
"""(attempt of the pod, restarts of the child process). A process replaces one of the same name with a lower incarnation."""
RefusalReason = Literal["wrong_job", "wire_version", "older_epoch", "newer_epoch", "duplicate_rank"]
"""older_epoch, newer_epoch: the epoch of the member is older, or newer, than that of the hub."""


class MemberState(StrEnum):
    """JOINING -> CONSTRUCTING -> READY -> UPDATING <-> SERVING -> DRAINING -> DRAINED; SUSPECT and LOST by silence or a child's end."""

    JOINING = "joining"
    """Said hello; holds no worker object."""
    CONSTRUCTING = "constructing"
    """Builds its worker object, or a new engine for it after the loss of one."""
    READY = "ready"
    """Takes method calls."""
    UPDATING = "updating"
    """Receives weights; gets no work."""
    SERVING = "serving"
    """Works."""
    DRAINING = "draining"
    """Finishes or returns its work, and takes no more."""
    DRAINED = "drained"
    """Has no work and gets none. It waits for the deletion of its pod, or has ended."""
    SUSPECT = "suspect"
    """Has sent no heartbeat for deadlines.suspect seconds; gets no new work."""
    LOST = "lost"
    """Its process has ended, or has been silent for deadlines.lost seconds."""

    @property
    def gone(self) -> bool:
        """Return whether the member is lost or has drained."""
        return self in (MemberState.LOST, MemberState.DRAINED)

    @property
    def constructed(self) -> bool:
        """Return whether the member holds a worker object and takes calls. False while it is SUSPECT or DRAINING."""
        return self in (MemberState.READY, MemberState.UPDATING, MemberState.SERVING)

    @property
    def visible(self) -> "MemberState":
        """Return the state that other members see: READY for every state in which the member takes calls.

        A weight sync moves each rollout between UPDATING and SERVING. Nobody who calls a rollout needs to know, so nothing is sent.
        """
        return MemberState.READY if self.constructed else self


@record
class MemberId:
    """One process of a member. A restarted process has the same name and a higher incarnation."""

    wire_tolerant = True
    name: str
    """`group:rank`."""
    incarnation: Incarnation


@record
class MemberView:
    """The information about a member that the members that may call it receive."""

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
    """The request of a process to become a member."""

    wire_tolerant = True
    wire_version: int
    uid: str
    """Unique id of the job it belongs to."""
    epoch: int
    member: MemberView
    """The process as the others will see it."""
    registration: int
    """Number of this registration of the process, from 1. A hello that is repeated because its answer was late repeats the number."""
    device_uuids: tuple[str, ...] = ()
    python: str = ""
    """Version of its interpreter, for the log."""


@record
class HelloAccepted:
    """The hub accepts the process as a member."""

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
    """The hub does not accept the process as a member."""

    wire_tolerant = True
    reason: RefusalReason
    epoch: int
    """Epoch of the hub. With the reason older_epoch the process starts over at this epoch."""


DISK_SPACE = "disk space"
"""What a run waits for that must write to a full disk, in the place of a member."""


class WaitCause(StrEnum):
    """The cause of a wait, for waits whose cause cannot be found at the member that is waited for."""

    CHANNEL_FULL = "channel_full"
    WEIGHTS = "weights"


@record
class DeclaredWait:
    """A wait that a worker reports. The cause of a stall is looked for at the member on which the waits end."""

    wire_tolerant = True
    what: str
    on: str
    """Member, group or channel."""
    since_seconds: float
    """Seconds that it has waited when it reports the wait."""
    cause: WaitCause | None = None

    def __post_init__(self) -> None:
        if self.cause is not None:  # an enum travels as its text
            object.__setattr__(self, "cause", WaitCause(self.cause))


@record
class Heartbeat:
    """The regular report of a member: its state, weights, progress and metrics."""

    wire_tolerant = True
    state: MemberState
    policy_version: int | None = None
    digest: str | None = None
    weights_proof: str = ""
    """How it is proven that its engine holds the weights: by the engine's own tensors, or by its answer to a fixed prompt; "" = it holds none."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """Counters by kind since the process started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Gauges and counters of the worker by name."""
    wait: DeclaredWait | None = None
    """The oldest of its declared waits."""
    memory_bytes: int = 0
    """Resident memory."""
    view_version: int = -1
    """Version of the last view that it received; -1 = none."""

    def __post_init__(self) -> None:
        _revive_state(self)


@record
class HeartbeatAnswer:
    """The hub's reply to a heartbeat."""

    wire_tolerant = True
    known: bool
    """Whether the process is a member. One that is not must say hello again."""
    view: View | None = None
    """None: nothing changed since the heartbeat's `view_version`."""
    num_serving: int = 0
    """Members of the sender's group that are in the state SERVING."""


def _revive_state(message: Any) -> None:
    """Turn the state, which travels as text, into an enum member."""
    object.__setattr__(message, "state", MemberState(message.state))
