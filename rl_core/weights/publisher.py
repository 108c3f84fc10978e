"""The sending end of weight sync: offers each version to every rollout, commits it, and serves it to late joiners.

Rank 0 of the actor owns the publisher. A version passes three interfaces: a `VersionSource` yields its buckets; `HostCopies` writes them to
host memory, and `PatchEncoder` makes a patch as well; a `WeightTransport` sends the bytes. `publish` gathers and copies in the caller's
thread and then lets the event loop of the process talk to the receivers, so the trained tensors may be changed as soon as it returns.
Receivers that are slower than the others get the version from the host copy afterwards, until the next version is published.
`weights_pull` is answered from the committed copy at any time between two publishes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rl_core.api.errors import ConfigError, DeadlineExceeded
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import LateReport, PublishReport, ReceiverAddress
from rl_core.plan.groups import ROLLOUT, groups_of
from rl_core.transports import sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.weights import checksums
from rl_core.weights.adapters import AdapterEncoder, sends_adapters
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import RelayPool
from rl_core.weights.handshake import CommitGate, Handshake, HandshakeState
from rl_core.weights.host_copy import HostCopies, HostCopy
from rl_core.weights.patch_encoder import PatchEncoder
from rl_core.weights.pull_server import PullServer
from rl_core.weights.receiver_state import NO_VERSION
from rl_core.weights.source_factory import SourceFactory
from rl_core.weights.version_source import VersionSource
from rl_core.weights.weight_transport import (
    Broadcast,
    DeviceIpc,
    Place,
    PointToPoint,
    WeightTransport,
    maps_devices,
)

if TYPE_CHECKING:
    from rl_core.weights.device_buffer import DeviceBuffer, Handle

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _LateSync(NamedTuple):
    """The late part of a sync: receivers that still load the version although it is committed."""

    version: int
    handshakes: list[Handshake]
    delivery: asyncio.Task[None]


class WeightPublisher:
    """Publishes the versions of one epoch. Late joiners pull from its `address`.

    `cfg`: the job's spec or a mapping of it. `bind` needs `keys` unless it is a loopback address.
    """

    def __init__(
        self,
        cfg: RLJobSpec | Mapping[str, Any],
        epoch: int,
        *,
        identity: Identity | None = None,
        keys: KeyRing | None = None,
        bind: str = "tcp://127.0.0.1:0",
        device: str = "cpu",
        device_uuid: str | None = None,
        deadlines: Deadlines | None = None,
        host_token: str | None = None,
    ) -> None:
        """`device` ("cpu" or "cuda:N") and `device_uuid`: device of the trained weights. `deadlines`: None for those of the job.

        `host_token`: None for the token of this host; with any other text every receiver counts as remote (for tests and benchmarks).
        """
        self.cfg = RLJobSpec.model_validate(cfg) if isinstance(cfg, Mapping) else cfg
        if self.cfg.weights.encrypt and keys is None:
            raise ConfigError("weights.encrypt needs CURVE keys, got none; set RLJOB_CURVE_DIR or encrypt: false")
        self.epoch = epoch
        self._identity, self._keys, self._device = identity, keys, device
        self._deadlines = deadlines or Deadlines.from_spec(self.cfg)
        self._last_commit = NO_VERSION
        """Version and digest of the last commit."""
        self._clients: dict[str, RpcClient] = {}
        self._publish_lock = threading.Lock()
        """Serialises `publish`: two at a time would write the same memory and send their offers in any order."""
        self._late: _LateSync | None = None
        """The receivers that were slow in the last sync. Set on the event loop, and read by the thread that publishes."""
        self._loop = HandlerLoop.shared().loop
        host = sockets.split_address(bind)[0]
        self._copies = HostCopies(ProcessSharedMemory.shared(identity.uid if identity is not None else "").store)
        settings = self.cfg.weights
        self._patch_encoder = (
            PatchEncoder(self._copies, verify_every=settings.verify_every) if settings.syncer == "patch" else None
        )
        self._adapter_encoder = (
            AdapterEncoder(self._copies, verify_every=settings.verify_every) if sends_adapters(self.cfg) else None
        )
        self._source_factory = SourceFactory(host, keys=keys, encrypt=self.cfg.weights.encrypt, host_token=host_token)
        self._relays = RelayPool(settings.fanout, encrypted=settings.encrypt) if settings.fanout else None
        self._pull_server = PullServer(self._copies, self._source_factory, self._deadlines, self._relays)
        self._device_buffer: DeviceBuffer | None = None
        """Copy of the version in device memory, if receivers map it there or a group of devices gets it from there."""
        self._transport = self._make_transport(host, device_uuid)
        handlers = {"weights_pull": self._pull_server.pull, "weights_pulled": self._pull_server.pulled}
        pulling_groups = [group.name for group in groups_of(self.cfg).values() if group.pulls_weights]
        allowed = dict.fromkeys(pulling_groups, frozenset(handlers)) if keys is not None else None
        self._server = RpcServer(bind, handlers, keys, identity, allowed=allowed, service="weights").start()
        self.address = self._server.address
        """Address at which `weights_pull` is served."""
        checksums.kernels()

    def _make_transport(self, host: str, device_uuid: str | None) -> WeightTransport:
        """Return how weights are sent to receivers, as `weights.transport` asks for.

        With `auto`, patches, adapters, and weights on a CPU are sent to each receiver separately. So are weights that must be encrypted, unless
        receivers read them in the memory of a GPU that they share, because a broadcast is not encrypted.
        """
        transport, point_to_point = self.cfg.weights.transport, PointToPoint(self._source_factory, self._relays)
        sends_patches = self._patch_encoder is not None or self._adapter_encoder is not None
        if transport == "zmq" or (transport == "auto" and (self._device == "cpu" or sends_patches)):
            return point_to_point
        if self.cfg.weights.encrypt and not maps_devices(self.cfg, self._device):
            return point_to_point
        if self._device != "cpu" or transport == "ipc":
            from rl_core.weights.device_buffer import DeviceBuffer  # needs torch

            self._device_buffer = DeviceBuffer(optional=transport != "ipc") if transport != "gloo" else None
        if maps_devices(self.cfg, self._device) and self._device_buffer is not None:
            place = (self._source_factory.host_token, device_uuid or self._device)
            return DeviceIpc(point_to_point, self._device_buffer, wanted=transport, place=place)
        return Broadcast(
            point_to_point,
            wanted=transport,
            host=host,
            epoch=self.epoch,
            device=self._device,
            device_uuid=device_uuid,
            timeout=self._deadlines.collective_seconds,
            device_buffer=self._device_buffer,
        )

    def current(self) -> tuple[int, str]:
        """Return (version, digest) of the version that late joiners pull; (-1, "") before the first commit and during a publish."""
        copy = self._pull_server.committed
        return (copy.manifest.version, copy.manifest.digest) if copy is not None else NO_VERSION

    @property
    def needs_base(self) -> bool:
        """Return whether the next source must have all tensors. False: adapters suffice, because the base of the last version is used."""
        return self._adapter_encoder is None or not self._adapter_encoder.has_base

    @property
    def cannot_map(self) -> frozenset[str]:
        """Return the names of receivers that cannot map device memory."""
        return frozenset(self._transport.cannot_map if isinstance(self._transport, DeviceIpc) else ())

    def publish(
        self,
        version: int,
        source: VersionSource,
        receivers: Sequence[ReceiverAddress],
        min_acks: int,
        device_handles: "Mapping[Place, list[Handle]] | None" = None,
    ) -> PublishReport:
        """Publish `version` of `source` to `receivers`. Returns a report that names those that serve it, have failed or are late.

        Returns once enough receivers serve the committed version, and slower ones are late: they are served in the background. If groups share
        devices, returns only when all receivers have ended. Stops the delivery of the previous version to receivers that were late.

        `device_handles`: handles of copies of the version on other devices, which are complete once all buckets of `source` were read. Handles
        that receivers have opened are removed.

        Publishing the same version again is harmless: receivers that serve it acknowledge without data. Raises DeadlineExceeded, naming each
        missing receiver, if fewer than `min_acks` rollouts acknowledge; ValueError if the version is older than the committed one, or equal
        with other weights.
        """
        refuse_on_event_loop("publish()")
        with self._publish_lock:
            if version < self._last_commit[0]:
                raise ValueError(
                    f"version must not go back inside an epoch: {self._last_commit[0]} is committed, got {version}"
                )
            started = time.monotonic()
            self._stop_late()
            self._pull_server.withdraw()
            try:
                source = source if self._device_buffer is None else self._device_buffer.copying(source)
                encoder = self._adapter_encoder or self._patch_encoder or self._copies
                copy = encoder.write(source, version=version, epoch=self.epoch, device=self._device)
                copied = time.monotonic()
                if isinstance(self._transport, DeviceIpc):
                    self._transport.handles = device_handles or {}
                completed, late = self._send(copy, receivers, min_acks, self._deadlines.after(copied - started))
            finally:
                self._loop.call_soon_threadsafe(self._pull_server.settle)
            return _report(copy, completed, late, min_acks, started=started, copied=copied)

    async def late_receivers(self) -> LateReport:
        """Wait until each receiver that was late in the last sync serves its version or has failed, and return the report."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._await_late(), self._loop))

    def lost(self, name: str, reason: str) -> None:
        """Stop waiting for receiver `name`, which the hub declared dead."""
        client = self._clients.pop(name, None)
        if client is not None:
            client.fail(reason)

    def close(self) -> None:
        """Stop serving and free the host copies."""
        self._stop_late()
        self._server.close()
        self._source_factory.close()
        self._transport.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._copies.close()

    # --- one sync --------------------------------------------------------------------------------------------------

    def _send(
        self, copy: HostCopy, receivers: Sequence[ReceiverAddress], min_acks: int, deadlines: Deadlines
    ) -> tuple[list[Handshake], list[Handshake]]:
        """Offer `copy`; return the handshakes that have ended, and those of late receivers."""
        manifest = copy.manifest
        if manifest.version == self._last_commit[0] and manifest.digest != self._last_commit[1]:
            raise ValueError(
                f"version {manifest.version} is committed with digest {self._last_commit[1]} and other weights; raise the version"
            )
        handshakes = [
            Handshake(
                name=receiver.name,
                client=self._client(receiver),
                host_token=receiver.host_token,
                counts=receiver.group == ROLLOUT,
            )
            for receiver in receivers
        ]
        for handshake in handshakes:
            self._transport.start(handshake, copy, deadlines)
        late = self._run(self._sync(copy, handshakes, min_acks, deadlines))
        return [handshake for handshake in handshakes if handshake not in late], late

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _sync(
        self, copy: HostCopy, handshakes: list[Handshake], min_acks: int, deadlines: Deadlines
    ) -> list[Handshake]:
        """Complete the `handshakes`, whose offers were sent, and return those of late receivers, which continue in the background."""
        grace = deadlines.straggler(copy.manifest.total_bytes)
        gate = CommitGate(min_acks=min_acks, straggler_seconds=grace, opened=lambda: self._commit(copy))
        gate.watch(handshakes)
        self._copies.hold(copy, self)
        delivery = asyncio.create_task(self._transport.deliver(handshakes, copy, gate, deadlines))
        delivery.add_done_callback(lambda _: self._copies.drop(copy, self))
        # Roles that share devices take turns: a receiver must not load while the trainer computes.
        shared = isinstance(self._transport, DeviceIpc) or self.cfg.placement.mode != "disaggregated"
        await asyncio.wait([delivery] if shared else [delivery, gate.settled], return_when=asyncio.FIRST_COMPLETED)
        if delivery.done():
            delivery.result()
            return []
        late = [handshake for handshake in handshakes if not handshake.ended]
        self._late = _LateSync(copy.manifest.version, late, delivery)
        return late

    async def _await_late(self) -> LateReport:
        late = self._late
        if late is None:
            return LateReport(version=self._last_commit[0], acked=(), failed={})
        await asyncio.wait([late.delivery])
        if not late.delivery.cancelled() and (error := late.delivery.exception()) is not None:
            raise error
        failed = [handshake for handshake in late.handshakes if handshake.state is HandshakeState.FAILED]
        return LateReport(
            version=late.version,
            acked=tuple(handshake.name for handshake in late.handshakes if handshake.acknowledged),
            failed={} if late.delivery.cancelled() else {handshake.name: handshake.describe() for handshake in failed},
        )

    def _stop_late(self) -> None:
        """Stop delivering the last version to late receivers: they are offered the next one, or the publisher closes."""
        late, self._late = self._late, None
        if late is not None:
            self._run(_cancel(late.delivery))

    def _commit(self, copy: HostCopy) -> None:
        self._last_commit = (copy.manifest.version, copy.manifest.digest)
        self._pull_server.commit(copy)

    def _client(self, receiver: ReceiverAddress) -> RpcClient:
        client = self._clients.get(receiver.name)
        if client is None or client.address != receiver.address:
            if client is not None:
                client.close()
            service = receiver.group if self._keys is not None else None
            client = self._clients[receiver.name] = RpcClient(
                receiver.address, self._keys, self._identity, service=service
            )
        return client


async def _cancel(delivery: asyncio.Task[None]) -> None:
    delivery.cancel()
    await asyncio.wait([delivery])


def _report(
    copy: HostCopy,
    handshakes: Sequence[Handshake],
    late: Sequence[Handshake],
    min_acks: int,
    *,
    started: float,
    copied: float,
) -> PublishReport:
    """Return the report of a sync. `handshakes` have ended; those of `late` receivers have not."""
    acked = [handshake for handshake in handshakes if handshake.acknowledged]
    num_acks = sum(handshake.counts for handshake in acked)
    if num_acks < min_acks:
        unacknowledged = "; ".join(handshake.describe() for handshake in (*handshakes, *late) if handshake not in acked)
        total = sum(handshake.counts for handshake in (*handshakes, *late))
        raise DeadlineExceeded(
            f"version {copy.manifest.version} must be acknowledged by {min_acks} rollouts, got {num_acks} of {total}"
            f"{': ' + unacknowledged if unacknowledged else ''}; start more rollouts or lower minReplicas"
        )
    now = time.monotonic()
    transports = {handshake.transport for handshake in handshakes if handshake.transport}
    acks = [handshake.ack for handshake in acked if handshake.ack is not None]
    return PublishReport(
        version=copy.manifest.version,
        digest=copy.manifest.digest,
        acked=tuple(handshake.name for handshake in acked),
        failed={handshake.name: handshake.describe() for handshake in handshakes if handshake not in acked},
        seconds=now - started,
        bytes=_bytes(copy, acked),
        transport="+".join(sorted(transports)) or "none",
        copy_seconds=copied - started,
        sync_seconds=now - copied,
        apply_seconds=max((ack.apply_seconds for ack in acks), default=0.0),
        pause_seconds=max((ack.pause_seconds for ack in acks), default=0.0),
        patched=tuple(handshake.name for handshake in acked if handshake.patched),
        relayed=tuple(handshake.name for handshake in acked if handshake.relayed),
        patch_share=copy.patch_share,
        late=tuple(handshake.name for handshake in late),
    )


def _bytes(copy: HostCopy, acked: Sequence[Handshake]) -> int:
    """Return the largest number of bytes that a receiver of `acked` needed; the size of the version if no receiver needed any."""
    recipients = [handshake for handshake in acked if handshake.transport]
    if copy.patch is not None and recipients and all(handshake.patched for handshake in recipients):
        return copy.patch.nbytes
    return copy.manifest.total_bytes
