"""The messages of a weight sync between publisher, receivers and runner.

runner    -> actor      sync_model_to_rollout(version, [ReceiverAddress], min_acks) -> PublishReport on rank 0
runner    -> actor      late_receivers() -> LateReport from rank 0, when the receivers that were late have taken the version or failed
publisher -> receiver   weights_offer(WeightOffer) -> ReceiverReady | ReceiverApplied | ReceiverAck | ReceiverRefusal | ReceiverFailure
publisher -> receiver   weights_transfer(WeightTransfer) -> ReceiverApplied | ReceiverReady | ReceiverFailure
publisher -> receiver   weights_commit(version, digest) -> ReceiverAck | ReceiverRefusal
publisher -> receiver   weights_relay(digest, encrypted) -> StreamSource | ReceiverRefusal: a stream of what it has proven, for another receiver
receiver  -> publisher  weights_pull(PullRequest) -> PullOffer | PullRefusal, then weights_pulled(ticket)
"""

from typing import TYPE_CHECKING, ClassVar

from rl_core.messages.registry import record

if TYPE_CHECKING:
    import numpy as np

# --- between the runner and the actor -----------------------------------------------------------------------------------


@record
class ReceiverAddress:
    """The address of a member that is to receive a version."""

    name: str
    address: str
    """Where its RPC is served."""
    host_token: str
    """Equal on processes that share memory."""
    group: str = "rollout"
    """Group of the member. Only acknowledgements of rollouts count towards the number that a sync needs."""
    devices: tuple[str, ...] = ()
    """UUIDs of the accelerators of the member."""


@record
class PublishReport:
    """The result of one sync."""

    version: int
    digest: str
    """Digest of the version's manifest."""
    acked: tuple[str, ...]
    """Receivers that serve the version."""
    failed: dict[str, str]
    """Receiver -> last state and reason of those that do not, and do not load it any more."""
    seconds: float
    """The whole publish."""
    bytes: int
    """Largest number of bytes that a receiver needed: the size of the version, or of its patch if all receivers used the patch."""
    transport: str
    """How the bytes were sent: shared, stream, message, gloo, nccl, ipc, joined by "+"; "none" if no receiver needed bytes."""
    copy_seconds: float
    """Gathering the weights and copying them to host memory."""
    sync_seconds: float
    """From OFFER to the last ACK of `acked`."""
    apply_seconds: float
    """Longest time a receiver took to load and verify."""
    pause_seconds: float
    """Longest time a receiver served nothing."""
    patched: tuple[str, ...] = ()
    """Receivers that took the patch."""
    relayed: tuple[str, ...] = ()
    """Receivers that got the bytes from another one."""
    patch_share: float | None = None
    """Share of the elements that differ from the version before it; None = there was none to compare with."""
    late: tuple[str, ...] = ()
    """Receivers that were slower than the others and still load the version; `LateReport` says how that ended."""


@record
class LateReport:
    """How a sync ended for the receivers that were late."""

    version: int
    acked: tuple[str, ...]
    """Receivers that serve the version."""
    failed: dict[str, str]
    """Receiver -> last state and reason of those that do not. Not those to which a newer version is offered meanwhile."""


# --- what changed --------------------------------------------------------------------------------------------------------


@record
class TensorPatch:
    """The changes of one tensor, as a range in the data of its patch."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Type on the wire: "float32", "bfloat16", ..."""
    count: int
    """Number of elements that are sent."""
    gap_bytes: int
    """1, 2 or 4: size of a gap, the distance of a position from the one before it (the first: from 0). 0 = all elements, no gaps."""
    start: int
    """Where its gaps begin; its values follow at the next multiple of 8 bytes."""


# --- where the bytes are ------------------------------------------------------------------------------------------------


@record
class GroupPlan:
    """The members of a process group and the address of its store."""

    name: str
    """What it is for, such as "weights"."""
    epoch: int
    """Epoch of the job; groups of different epochs never meet."""
    generation: int
    """Rises with each formation of the same name and epoch."""
    members: tuple[str, ...]
    """Names in rank order."""
    backend: str
    """gloo or nccl."""
    host: str
    """Where the store is."""
    port: int

    @property
    def key(self) -> str:
        """The prefix of this generation's keys in the store."""
        return f"{self.name}/{self.epoch}/{self.generation}"


@record
class SharedSource:
    """A segment of shared memory that holds all buckets; for receivers of the publisher's host."""

    kind: ClassVar[str] = "shared"
    segment: str
    nbytes: int


@record
class BulkTicket:
    """Lets one receiver read one bulk stream."""

    address: str
    """`tcp://host:port` of the sender."""
    ticket: bytes
    """Names the stream; used up when it is shown."""
    key: bytes
    """Key of the tags that authenticate each chunk."""
    role: str = "actor"
    """Role of the sender, whose CURVE key makes a stream secret."""


@record
class StreamSource:
    """A bulk stream of all buckets. Valid for one receiver."""

    kind: ClassVar[str] = "stream"
    ticket: BulkTicket
    encrypted: bool
    """Whether the stream is secret as well (CURVE)."""


@record
class MessageSource:
    """The bytes of a patch inside the message. Used for a patch so small that opening a stream would take longer."""

    kind: ClassVar[str] = "message"
    data: "np.ndarray"
    """uint8."""


@record
class GroupSource:
    """Broadcasts of the buckets, one after the other, in a process group."""

    plan: GroupPlan
    rank: int
    """Rank of the receiver; the first one if it is several members (`ReceiverReady.devices`)."""

    @property
    def kind(self) -> str:
        """The backend."""
        return self.plan.backend


@record
class DeviceSource:
    """Memory with all buckets on the devices that trainer and receiver share. Valid for one receiver."""

    kind: ClassVar[str] = "ipc"
    handles: tuple[tuple[int | bytes | bool, ...], ...]
    """A handle by which torch maps the memory, for each of `ReceiverReady.devices`."""


@record
class PatchSource:
    """The data of a patch, for a receiver that serves the version it was made from."""

    base: str
    """Digest of that version."""
    tensors: tuple[TensorPatch, ...]
    data: SharedSource | StreamSource | MessageSource
    verify: tuple[str, ...]
    """Tensors that are read whole afterwards, changed or not."""

    @property
    def kind(self) -> str:
        """The kind of source that carries the data."""
        return self.data.kind


WeightSource = SharedSource | StreamSource | GroupSource | DeviceSource | PatchSource

# --- the handshake ------------------------------------------------------------------------------------------------------


@record
class WeightOffer:
    """OFFER: a version exists."""

    digest: str
    """Digest of the manifest; it proves version, epoch, names and contents."""
    manifest: bytes
    """`WeightManifest.packed`."""
    bucket_bytes: int
    """Size by which the tensors are cut into buckets."""
    deadline: float
    """Seconds until the publisher has given this sync up."""
    source: WeightSource | None = None
    """Where the data are already; None = they come with a transfer, after READY."""
    patch: PatchSource | None = None
    """Where the patch is already, for receivers that serve its base."""
    keep: bool = False
    """Whether later versions may be sent as patches. The receiver then keeps the tensors that it cannot read back from its engine."""


@record
class WeightTransfer:
    """TRANSFER: the offered data are here."""

    digest: str
    source: WeightSource


@record
class ReceiverReady:
    """READY: the receiver serves nothing any more and waits for the data. After a patch that failed verification it waits for the whole version."""

    have: tuple[int, str]
    """Version and digest that it can prove; (-1, "") for none."""
    devices: tuple[str, ...]
    """UUID of the device of each process that reads a source, or "cpu": one process, or each one of an engine that reads it itself."""
    group: str = ""
    """Key of the plan whose process group it is in; "" for none. A process that took a lost member's name and address is in none."""


@record
class ReceiverApplied:
    """APPLIED: the version is loaded and proven, not served yet."""

    version: int
    digest: str
    loaded: bool
    """Whether bytes were loaded for it."""
    patched: bool = False
    """Whether these bytes were those of a patch."""
    opened: tuple[int, ...] = ()
    """Numbers of the handles of a `DeviceSource` that were opened."""


@record
class ReceiverAck:
    """ACK: the version is served."""

    version: int
    digest: str
    pause_seconds: float = 0.0
    """How long nothing was served; 0 when it was served already."""
    apply_seconds: float = 0.0
    """How long loading and verifying took."""


@record
class ReceiverRefusal:
    """REFUSE: the receiver does not accept the version, or does not have the version that it is to commit."""

    reason: str


@record
class ReceiverFailure:
    """FAILED: the data did not arrive or are not what the manifest says."""

    names: tuple[str, ...]
    """Tensors whose checksum differs; empty when it failed otherwise."""
    reason: str
    aborted: bool = False
    """Whether only the process group ended, so that the version may be offered again."""
    opened: tuple[int, ...] = ()
    """Numbers of the handles of a `DeviceSource` that were opened."""


ReceiverAnswer = ReceiverReady | ReceiverApplied | ReceiverAck | ReceiverRefusal | ReceiverFailure

# --- late joiners -------------------------------------------------------------------------------------------------------


@record
class PullRequest:
    """PULL: a receiver asks for the committed version."""

    host_token: str
    """Equal to the publisher's when the two share memory."""
    base: str = ""
    """Digest of the base below adapters that it has proven; "" for none."""
    direct: bool = False
    """Whether the publisher is to give it itself: what came from another receiver failed."""


@record
class PullOffer:
    """The committed version, held for the receiver until it returns `ticket`."""

    ticket: str
    version: int
    epoch: int
    offer: WeightOffer


@record
class PullRefusal:
    """There is no committed version."""

    reason: str
