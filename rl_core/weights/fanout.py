"""Receivers that pass a version on to other receivers (`weights.fanout`), so that the publisher does not send it to each of them.

The publisher and each receiver that has verified a version serve up to `fanout` others at a time, by streams. `RelaySlots` chooses the
next sender; `RelayPool` asks that receiver for a stream. Only the bytes come from other receivers: the publisher itself sends the offer
and the commit to every receiver, and it sends the bytes if a relay fails.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence

from rl_core.api.errors import RLJobError
from rl_core.messages.weights import StreamSource
from rl_core.weights.handshake import Handshake, HandshakeState

logger = logging.getLogger(__name__)

PUBLISHER = ""
RELAY_SECONDS = 10.0
"""Seconds that a receiver may take to open a stream. Opening does not read the weights."""


class RelaySlots:
    """Counts how many more receivers each sender of one version may serve."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._free = {PUBLISHER: fanout}

    def add(self, name: str) -> None:
        """Allow `name`, which has the version, to serve others."""
        self._free.setdefault(name, self._fanout)

    def remove(self, name: str) -> None:
        """Do not use `name` any more."""
        if name != PUBLISHER:
            self._free.pop(name, None)

    def acquire(self) -> str | None:
        """Return the sender for the next receiver: the one with the most free slots, the publisher last. None if no slot is free."""
        available = [name for name, free in self._free.items() if free]
        if not available:
            return None
        name = max(available, key=lambda sender: (sender != PUBLISHER, self._free[sender]))
        self._free[name] -= 1
        return name

    def release(self, name: str) -> None:
        """Free the slot that `acquire` took."""
        if name in self._free:
            self._free[name] += 1


class RelayPool:
    """The receivers that can pass on the newest version. Used on the publisher's event loop."""

    def __init__(self, fanout: int, *, encrypted: bool = False) -> None:
        """`fanout`: receivers that each sender may serve at a time; `encrypted`: whether streams are encrypted."""
        self._fanout, self._encrypted = fanout, encrypted
        self._digest = ""
        self._slots = RelaySlots(fanout)
        self._peers: dict[str, Handshake] = {}
        self._changed = asyncio.Condition()
        """Guards `_slots`; notified when a slot may be free."""
        self._next_peer = itertools.count()

    def _start_version(self, digest: str) -> None:
        """Forget the senders of any version other than `digest`."""
        if digest != self._digest:
            self._digest, self._slots, self._peers = digest, RelaySlots(self._fanout), {}

    async def joined(self, digest: str, handshake: Handshake) -> None:
        """Register a receiver that has verified the version `digest`, so that it can serve others."""
        async with self._changed:
            self._start_version(digest)
            self._peers[handshake.name] = handshake
            self._slots.add(handshake.name)
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def sender(self, digest: str) -> AsyncIterator[Handshake | None]:
        """Wait for a sender of the version `digest` with a free slot and hold the slot; None stands for the publisher."""
        async with self._changed:
            self._start_version(digest)
            slots = self._slots
            while (name := slots.acquire()) is None:
                await self._changed.wait()
        try:
            yield self._peers.get(name)
        finally:
            async with self._changed:
                slots.release(name)
                self._changed.notify_all()

    async def stream(self, peer: Handshake) -> StreamSource | None:
        """Return a stream of the version from `peer`. If it gives none, return None and do not use it again."""
        try:
            answer = await peer.client.call("weights_relay", self._digest, self._encrypted, timeout=RELAY_SECONDS)
        except RLJobError as error:
            answer = error
        if isinstance(answer, StreamSource):
            return answer
        await self.failed(peer, str(answer))
        return None

    async def failed(self, peer: Handshake, reason: str) -> None:
        """Do not use `peer` for this version any more."""
        logger.warning("%s does not pass the weights on, the publisher gives them: %s", peer.name, reason)
        async with self._changed:
            self._slots.remove(peer.name)
            self._peers.pop(peer.name, None)
            self._changed.notify_all()

    async def for_joiner(self, digest: str) -> StreamSource | None:
        """Return a stream of the committed version from one of the receivers that serve it, in turn; None if there is none."""
        peers: Sequence[Handshake] = [peer for peer in self._peers.values() if peer.state is HandshakeState.ACKED]
        if digest != self._digest or not peers:
            return None
        return await self.stream(peers[next(self._next_peer) % len(peers)])
