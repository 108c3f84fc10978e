"""How the bytes of a version get from the publisher to its receivers.

The publisher chooses one `WeightTransport`: `PointToPoint` (ZeroMQ: shared memory on the same host, a stream otherwise), `DeviceIpc`
(receivers on the trainer's devices map memory there) or `Broadcast` (one process group for all receivers: NCCL between GPUs, gloo if
the job says so). The publisher creates the handshakes; the transport sends the offers and delivers the bytes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import DeviceSource, WeightTransfer
from rl_core.weights.adapters import sends_adapters
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import RelayPool
from rl_core.weights.handshake import CommitGate, Handshake, HandshakeState
from rl_core.weights.host_copy import HostCopy
from rl_core.weights.source_factory import SourceFactory, make_offer

if TYPE_CHECKING:
    from rl_core.weights.collective import GroupSender
    from rl_core.weights.device_buffer import DeviceBuffer, Handle

logger = logging.getLogger(__name__)

MAX_TRANSFERS = 2
"""Maximum number of transfers to one receiver. A patch that fails verification is followed by the whole version."""


Place = tuple[str, str]
"""A device: (token of its host, UUID)."""


def maps_devices(cfg: RLJobSpec, device: str) -> bool:
    """Return whether receivers map memory of the trainer's devices, of which `device` is one: the transport is `DeviceIpc`."""
    transport, sends_whole = cfg.weights.transport, cfg.weights.syncer != "patch" and not sends_adapters(cfg)
    shared = transport == "auto" and cfg.placement.mode != "disaggregated"
    return transport == "ipc" or (shared and device != "cpu" and sends_whole)


class WeightTransport(Protocol):
    """Takes a version from OFFER to ACK at every receiver. All methods but `start` run on the publisher's event loop."""

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER. May be called from any thread."""
        ...

    async def deliver(
        self, handshakes: Sequence[Handshake], copy: HostCopy, gate: CommitGate, deadlines: Deadlines
    ) -> None:
        """Deliver the version to the receivers of the started `handshakes`.

        COMMIT is sent after `gate` opens. Failures are recorded in the handshakes.
        """
        ...

    def close(self) -> None:
        """Free everything that is kept between versions."""
        ...


class PointToPoint:
    """Serves each receiver on its own, so a dead receiver does not affect the others.

    With `relays`, receivers that already have a version stream it to others.
    """

    def __init__(self, source_factory: SourceFactory, relays: RelayPool | None = None) -> None:
        self._source_factory, self._relays = source_factory, relays

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER.

        A receiver on this host, or one that can use a patch, finds the location of the data in the offer and loads it at once.
        """
        source, patch, seconds = None, None, deadlines.ready_seconds
        if self._source_factory.maps(copy, handshake.host_token):
            source = self._source_factory.source(copy, handshake.host_token)
        if copy.patch is not None:
            patch = self._source_factory.patch_source(copy.patch, handshake.host_token)
        if source is not None or patch is not None:
            seconds += deadlines.transfer(copy.manifest.total_bytes)
        offer = make_offer(copy, source, deadlines, patch)
        if self._relays is not None and source is None:
            # The receiver may have to wait for a free sender. It keeps the tensors that cannot be read back from its engine, to relay them.
            offer = replace(offer, keep=True, deadline=deadlines.sync_seconds)
        handshake.start(offer, seconds)

    async def deliver(
        self, handshakes: Sequence[Handshake], copy: HostCopy, gate: CommitGate, deadlines: Deadlines
    ) -> None:
        """Serve every receiver to the end, independently of the others."""
        await asyncio.gather(*(self._deliver(handshake, copy, gate, deadlines) for handshake in handshakes))

    async def _deliver(self, handshake: Handshake, copy: HostCopy, gate: CommitGate, deadlines: Deadlines) -> None:
        await handshake.offered()
        await self.finish(handshake, copy, gate, deadlines)

    async def finish(self, handshake: Handshake, copy: HostCopy, gate: CommitGate, deadlines: Deadlines) -> None:
        """Transfer the bytes to a receiver that still needs them, then commit."""
        manifest = copy.manifest
        for _ in range(MAX_TRANSFERS):
            if handshake.live:
                have = handshake.ready.have[1] if handshake.ready is not None else ""
                if self._relays is None or self._source_factory.needs_no_relay(copy, handshake.host_token, have):
                    await self._send(handshake, copy, deadlines, have)
                else:
                    await self._relay(self._relays, handshake, copy, deadlines)
        if handshake.live:
            handshake.fail(f"it asked for the version {MAX_TRANSFERS} times and applied none")
        if self._relays is not None and handshake.applied and not self._source_factory.maps(copy, handshake.host_token):
            await self._relays.joined(manifest.digest, handshake)
        if handshake.state is HandshakeState.APPLIED and await gate.wait():
            await handshake.commit(manifest.version, manifest.digest, deadlines.commit_seconds)

    async def _send(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines, have: str = "") -> None:
        source = self._source_factory.source(copy, handshake.host_token, have)
        transfer = WeightTransfer(digest=copy.manifest.digest, source=source)
        await handshake.transfer(transfer, deadlines.transfer(copy.manifest.total_bytes))

    async def _relay(self, relays: RelayPool, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Let another receiver stream the whole version to this one. If that fails, the publisher sends it."""
        manifest = copy.manifest
        async with relays.sender(manifest.digest) as peer:
            source = await relays.stream(peer) if peer is not None else None
            if peer is not None and source is not None:
                transfer = WeightTransfer(digest=manifest.digest, source=source)
                await handshake.transfer(transfer, deadlines.transfer(manifest.total_bytes), relayed=True)
                if not handshake.live:
                    return
                await relays.failed(peer, f"{handshake.name}: {handshake.reason}")
                self.start(handshake, copy, deadlines)
                await handshake.offered()
            if handshake.live:
                await self._send(handshake, copy, deadlines)

    def close(self) -> None:
        """Nothing is kept."""


class DeviceIpc:
    """Receivers on the trainer's devices map the version in device memory (CUDA IPC).

    Other receivers are served by `point_to_point`, unless the job requires ipc.
    """

    def __init__(
        self, point_to_point: PointToPoint, device_buffer: "DeviceBuffer", *, wanted: str, place: Place
    ) -> None:
        """`device_buffer` holds the version; `wanted` is the setting weights.transport; `place` is the publisher's device."""
        self._point_to_point, self._device_buffer = point_to_point, device_buffer
        self._wanted, self._place = wanted, place
        self.handles: Mapping[Place, list[Handle]] = {}
        """CUDA IPC handles of the copies on other GPUs of the trainer, by device. Those that an engine opened are removed."""
        self._unused: list[Handle] = []
        """Handles of `device_buffer` that an engine was given and did not open."""
        self.cannot_map: set[str] = set()
        """Names of receivers that cannot map device memory."""

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER without a source. The READY answer names the receiver's devices."""
        handshake.start(make_offer(copy, None, deadlines), deadlines.ready_seconds)

    async def deliver(
        self, handshakes: Sequence[Handshake], copy: HostCopy, gate: CommitGate, deadlines: Deadlines
    ) -> None:
        """Serve every receiver to the end, then free the device memory."""
        try:
            await asyncio.gather(*(self._deliver(handshake, copy, gate, deadlines) for handshake in handshakes))
        finally:
            self._device_buffer.free(unused=self._unused)
            self._unused = []

    async def _deliver(self, handshake: Handshake, copy: HostCopy, gate: CommitGate, deadlines: Deadlines) -> None:
        await handshake.offered()
        if handshake.live and handshake.ready is not None:
            places = [(handshake.host_token, device) for device in handshake.ready.devices]
            handles = self._take(places) if handshake.name not in self.cannot_map else []
            if handles:
                await self._map(handshake, places, handles, copy, deadlines)
            elif self._wanted == "ipc":
                raise ConfigError(
                    f"weights.transport ipc needs a receiver on devices of the trainer that have memory for a copy, got {handshake.name} on "
                    f"{', '.join(handshake.ready.devices)}; use auto"
                )
        await self._point_to_point.finish(handshake, copy, gate, deadlines)

    def _take(self, places: Sequence[Place]) -> "list[Handle]":
        """Return one unused handle for each of `places`; an empty result if one of them has no copy of the version."""
        publisher_place = self._place if self._device_buffer.is_allocated else None
        if any(
            len(self.handles.get(place, ())) < count
            for place, count in Counter(places).items()
            if place != publisher_place
        ):
            return []
        return [
            self._device_buffer.handle() if place == publisher_place else self.handles[place].pop() for place in places
        ]

    def _put_back(self, unopened: "Iterable[tuple[Place, Handle]]") -> None:
        """Take back handles that no process has opened, so that they are released: torch keeps the memory of each until then."""
        for place, handle in unopened:
            (self._unused if place == self._place else self.handles[place]).append(handle)

    async def _map(
        self,
        handshake: Handshake,
        places: Sequence[Place],
        handles: "Sequence[Handle]",
        copy: HostCopy,
        deadlines: Deadlines,
    ) -> None:
        """Let the receiver map the version in device memory.

        A receiver that cannot map it, for example because of container isolation, is served by `point_to_point` from then on.
        """
        transfer = WeightTransfer(digest=copy.manifest.digest, source=DeviceSource(handles=tuple(handles)))
        await handshake.transfer(transfer, deadlines.transfer(copy.manifest.total_bytes))
        if handshake.opened is not None:
            numbered = enumerate(zip(places, handles, strict=True))
            self._put_back(pair for number, pair in numbered if number not in handshake.opened)
        if not handshake.live:
            return
        if self._wanted == "ipc":
            raise ConfigError(
                f"weights.transport ipc: {handshake.name} cannot map the device's memory: {handshake.reason}; use auto"
            )
        logger.warning(
            "%s cannot map the device's memory, it gets the weights through the host: %s",
            handshake.name,
            handshake.reason,
        )
        self.cannot_map.add(handshake.name)
        self.start(handshake, copy, deadlines)
        await handshake.offered()

    def close(self) -> None:
        """Nothing is kept."""


class Broadcast:
    """Sends the bytes to all receivers in one process group if the job or the devices allow it, otherwise by `point_to_point`."""

    def __init__(
        self,
        point_to_point: PointToPoint,
        *,
        wanted: str,
        host: str,
        epoch: int,
        device: str,
        device_uuid: str | None,
        timeout: float,
        device_buffer: "DeviceBuffer | None",
    ) -> None:
        """`wanted` is the setting weights.transport; `timeout` is in seconds, for forming the group and for each broadcast.

        `device_buffer`: holds the version on the publisher's device if that is a GPU; a group of devices is sent from it.
        """
        self._point_to_point = point_to_point
        self._wanted, self._host, self._epoch, self._timeout = wanted, host, epoch, timeout
        self._device, self._device_uuid, self._device_buffer = device, device_uuid, device_buffer
        self._group: GroupSender | None = None

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER without a source. The process group is formed from the receivers that answer READY."""
        handshake.start(make_offer(copy, None, deadlines), deadlines.ready_seconds)

    async def deliver(
        self, handshakes: Sequence[Handshake], copy: HostCopy, gate: CommitGate, deadlines: Deadlines
    ) -> None:
        """Wait for all answers, broadcast, then commit."""
        try:
            await asyncio.gather(*(handshake.offered() for handshake in handshakes))
            ready = [handshake.ready for handshake in handshakes if handshake.live and handshake.ready is not None]
            backend = self._backend([device for answer in ready for device in answer.devices])
            if backend is not None:
                await self._broadcast(backend, handshakes, copy, deadlines)
        finally:
            if self._device_buffer is not None:
                self._device_buffer.free()
        await asyncio.gather(
            *(self._point_to_point.finish(handshake, copy, gate, deadlines) for handshake in handshakes)
        )

    async def _broadcast(
        self, backend: str, handshakes: Sequence[Handshake], copy: HostCopy, deadlines: Deadlines
    ) -> None:
        """Broadcast to all receivers that are READY. If a member is lost, offer again and repeat with a group of the others."""
        sender = self._sender(backend)
        for _ in range(len(handshakes) + 1):
            ready = [handshake for handshake in handshakes if handshake.live]
            if not ready:
                return
            await sender.send(copy, ready, deadlines.transfer(copy.manifest.total_bytes))
            unfinished = [handshake for handshake in ready if handshake.live]
            for handshake in unfinished:
                self.start(handshake, copy, deadlines)
            await asyncio.gather(*(handshake.offered() for handshake in unfinished))
        for handshake in handshakes:
            if handshake.live:
                handshake.fail(f"the process group ended in every generation: {handshake.reason}")

    def _sender(self, backend: str) -> "GroupSender":
        if self._group is None:
            from rl_core.weights.collective import GroupSender  # needs torch, PointToPoint does not

            on_device = backend == "nccl"
            self._group = GroupSender(
                host=self._host,
                epoch=self._epoch,
                backend=backend,
                device=self._device if on_device else "cpu",
                timeout=self._timeout,
                device_buffer=self._device_buffer if on_device else None,
            )
        return self._group

    def _backend(self, devices: list[str]) -> str | None:
        """Return the backend for receivers on `devices` (UUIDs or "cpu"); None if they are served point to point."""
        member_devices = [self._device_uuid or self._device, *devices]
        possible = "cpu" not in member_devices and len(set(member_devices)) == len(member_devices)
        if self._wanted == "nccl" and not possible:
            raise ConfigError(
                f"weights.transport nccl needs a device of its own per member, got {member_devices}; use auto or zmq"
            )
        return "gloo" if self._wanted == "gloo" else "nccl" if possible and devices else None

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            self._group.close()
