"""How the bytes of an encoded version get from the publisher to its receivers: one class per way, chosen once per publisher.

Each to itself over ZeroMQ (`Star`: shared memory on one host, stream otherwise) or, on the publisher's own device, where it lies
(`OnDevice`), or all in one process group (`Together`: NCCL between GPUs, gloo when the job says so). The publisher builds the
handshakes, starts the offers, and lets the way deliver.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rl_core.api.errors import ConfigError
from rl_core.messages.weights import DeviceSource, WeightTransfer
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import Relays
from rl_core.weights.handshake import Gate, Handshake, HandshakeState
from rl_core.weights.host_copy import HostCopy
from rl_core.weights.outlets import Outlets, offer_of

if TYPE_CHECKING:
    from rl_core.weights.collective import GroupSender
    from rl_core.weights.device_memory import DeviceMemory

logger = logging.getLogger(__name__)

TRANSFERS = 2
"""A patch that does not hold at a receiver is followed by the whole version."""


class Way(Protocol):
    """Takes a version from OFFER to ACK at every receiver. On the publisher's loop, except `start`."""

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER; from any thread."""
        ...

    async def deliver(self, handshakes: Sequence[Handshake], copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        """Bring the started `handshakes` as far as they get; COMMIT goes out once `gate` opens."""
        ...

    def close(self) -> None:
        """Free what is kept between versions."""
        ...


class Star:
    """Each receiver by itself: a dead one costs the others nothing. With `relays` streams of whole versions come from any that has it."""

    def __init__(self, outlets: Outlets, relays: Relays | None = None) -> None:
        self._outlets, self._relays = outlets, relays

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER. A receiver of this host learns where the data are and loads in the same exchange, and so does any with a patch."""
        source, patch, seconds = None, None, deadlines.ready_seconds
        if self._outlets.maps(copy, handshake.host_token):
            source = self._outlets.source(copy, handshake.host_token)
        if copy.patch is not None:
            patch = self._outlets.patch_source(copy.patch, handshake.host_token)
        if source is not None or patch is not None:
            seconds += deadlines.transfer(copy.manifest.total_bytes)
        offer = offer_of(copy, source, deadlines, patch)
        if self._relays is not None and source is None:
            # It may wait for its turn, and what it cannot read back from its engine it keeps for others.
            offer = replace(offer, keep=True, deadline=deadlines.sync_seconds)
        handshake.start(offer, seconds)

    async def deliver(self, handshakes: Sequence[Handshake], copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        """Serve every receiver to the end, independently of the others."""
        await asyncio.gather(*(self._deliver(one, copy, gate, deadlines) for one in handshakes))

    async def _deliver(self, handshake: Handshake, copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        await handshake.offered()
        await self.finish(handshake, copy, gate, deadlines)

    async def finish(self, handshake: Handshake, copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        """Send the bytes to a receiver that still needs them, then COMMIT."""
        manifest = copy.manifest
        for _ in range(TRANSFERS):
            if handshake.live:
                have = handshake.ready.have[1] if handshake.ready is not None else ""
                if self._relays is None or self._outlets.is_near(copy, handshake.host_token, have):
                    await self._give(handshake, copy, deadlines, have)
                else:
                    await self._pass_on(self._relays, handshake, copy, deadlines)
        if handshake.live:
            handshake.fail(f"it asked for the version {TRANSFERS} times and applied none")
        if self._relays is not None and handshake.applied and not self._outlets.maps(copy, handshake.host_token):
            await self._relays.joined(manifest.digest, handshake)
        if handshake.state is HandshakeState.APPLIED and await gate.wait():
            await handshake.commit(manifest.version, manifest.digest, deadlines.commit_seconds)

    async def _give(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines, have: str = "") -> None:
        source = self._outlets.source(copy, handshake.host_token, have)
        transfer = WeightTransfer(digest=copy.manifest.digest, source=source)
        await handshake.transfer(transfer, deadlines.transfer(copy.manifest.total_bytes))

    async def _pass_on(self, relays: Relays, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Have whoever has room give all of the version; the publisher does where that one fails."""
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
                await self._give(handshake, copy, deadlines)

    def close(self) -> None:
        """Nothing is kept."""


class OnDevice:
    """A receiver on the publisher's device maps the version where it lies. Others get it as in `Star`, where the job does not say ipc."""

    def __init__(self, star: Star, memory: "DeviceMemory", *, wanted: str, host_token: str, device: str) -> None:
        """`memory` holds the version; `wanted`: weights.transport; `device`: UUID of the publisher's."""
        self._star, self._memory = star, memory
        self._wanted, self._host_token, self._device = wanted, host_token, device
        self._unable: set[str] = set()
        """Names of receivers that cannot map it."""

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER without a source: READY tells where the receiver is."""
        handshake.start(offer_of(copy, None, deadlines), deadlines.ready_seconds)

    async def deliver(self, handshakes: Sequence[Handshake], copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        """Serve every receiver to the end; then the device's memory is free."""
        try:
            await asyncio.gather(*(self._deliver(one, copy, gate, deadlines) for one in handshakes))
        finally:
            self._memory.free()

    async def _deliver(self, handshake: Handshake, copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        await handshake.offered()
        if handshake.live and handshake.ready is not None:
            here = (handshake.host_token, handshake.ready.device) == (self._host_token, self._device)
            if here and handshake.name not in self._unable:
                await self._map(handshake, copy, deadlines)
            elif self._wanted == "ipc":
                raise ConfigError(
                    f"weights.transport ipc needs a receiver on the trainer's device {self._device}, got {handshake.name} on "
                    f"{handshake.ready.device}; use auto"
                )
        await self._star.finish(handshake, copy, gate, deadlines)

    async def _map(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Have the receiver map the version; where it cannot, as containers may be kept apart, offer it by another way from then on."""
        source = DeviceSource(handle=self._memory.handle())
        transfer = WeightTransfer(digest=copy.manifest.digest, source=source)
        await handshake.transfer(transfer, deadlines.transfer(copy.manifest.total_bytes))
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
        self._unable.add(handshake.name)
        self.start(handshake, copy, deadlines)
        await handshake.offered()

    def close(self) -> None:
        """Nothing is kept."""


class Together:
    """All receivers in one process group where the job or the devices say so, else each by itself as in `Star`."""

    def __init__(
        self, star: Star, *, wanted: str, host: str, epoch: int, device: str, device_uuid: str | None, timeout: float
    ) -> None:
        """`wanted`: weights.transport. `timeout`: seconds for a formation and for each broadcast."""
        self._star = star
        self._wanted, self._host, self._epoch, self._timeout = wanted, host, epoch, timeout
        self._device, self._device_uuid = device, device_uuid
        self._group: GroupSender | None = None

    def start(self, handshake: Handshake, copy: HostCopy, deadlines: Deadlines) -> None:
        """Send OFFER without a source: the group is formed of those that answer READY."""
        handshake.start(offer_of(copy, None, deadlines), deadlines.ready_seconds)

    async def deliver(self, handshakes: Sequence[Handshake], copy: HostCopy, gate: Gate, deadlines: Deadlines) -> None:
        """Hear all, broadcast, commit."""
        await asyncio.gather(*(handshake.offered() for handshake in handshakes))
        backend = self._backend([one.ready.device for one in handshakes if one.live and one.ready is not None])
        if backend is not None:
            await self._broadcast(backend, handshakes, copy, deadlines)
        await asyncio.gather(*(self._star.finish(one, copy, gate, deadlines) for one in handshakes))

    async def _broadcast(
        self, backend: str, handshakes: Sequence[Handshake], copy: HostCopy, deadlines: Deadlines
    ) -> None:
        """Broadcast to all that are READY, again in a smaller group whenever a member is lost."""
        sender = self._sender(backend)
        for _ in range(len(handshakes) + 1):
            ready = [handshake for handshake in handshakes if handshake.live]
            if not ready:
                return
            await sender.send(copy, ready, deadlines.transfer(copy.manifest.total_bytes))
            again = [handshake for handshake in ready if handshake.live]
            for handshake in again:
                self.start(handshake, copy, deadlines)
            await asyncio.gather(*(handshake.offered() for handshake in again))
        for handshake in handshakes:
            if handshake.live:
                handshake.fail(f"the process group ended in every generation: {handshake.reason}")

    def _sender(self, backend: str) -> "GroupSender":
        if self._group is None:
            from rl_core.weights.collective import GroupSender  # needs torch, a star does not

            device = self._device if backend == "nccl" else "cpu"
            self._group = GroupSender(
                host=self._host, epoch=self._epoch, backend=backend, device=device, timeout=self._timeout
            )
        return self._group

    def _backend(self, devices: list[str]) -> str | None:
        """Return the backend for receivers on `devices` (UUIDs or "cpu"); None = each by itself over ZeroMQ."""
        own = [self._device_uuid or self._device, *devices]
        possible = "cpu" not in own and len(set(own)) == len(own)
        if self._wanted == "nccl" and not possible:
            raise ConfigError(
                f"weights.transport nccl needs a device of its own per member, got {own}; use auto or zmq"
            )
        return "gloo" if self._wanted == "gloo" else "nccl" if possible and devices else None

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            self._group.close()
