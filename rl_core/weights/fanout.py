"""Trees of receivers: who has a version passes it on (`weights.fanout`), so that the publisher's link does not carry it once for each.

The publisher and each receiver that has proven a version serve so many others at a time, by streams. `Tree` says who is
next to give, `Relays` asks that receiver for a stream. Only bytes go through the tree: every receiver is offered, proven and
committed by the publisher itself, and goes back to it for the bytes when its sender dies.
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
"""How long a receiver may take to open a stream; nothing has to be read for that."""


class Tree:
    """How many more receivers each sender of one version may serve."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._free = {PUBLISHER: fanout}

    def add(self, name: str) -> None:
        """Let `name`, which has the version, serve others."""
        self._free.setdefault(name, self._fanout)

    def drop(self, name: str) -> None:
        """Ask `name` no more."""
        if name != PUBLISHER:
            self._free.pop(name, None)

    def take(self) -> str | None:
        """Return who serves the next receiver: the least busy that has room, the publisher last; None = nobody has room."""
        able = [name for name, free in self._free.items() if free]
        if not able:
            return None
        name = max(able, key=lambda one: (one != PUBLISHER, self._free[one]))
        self._free[name] -= 1
        return name

    def give_back(self, name: str) -> None:
        """Let the place that `take` gave serve the next one."""
        if name in self._free:
            self._free[name] += 1


class Relays:
    """The receivers that pass the newest version on. On the publisher's loop."""

    def __init__(self, fanout: int, *, encrypted: bool = False) -> None:
        """`encrypted`: whether the streams are secret as well."""
        self._fanout, self._encrypted = fanout, encrypted
        self._digest = ""
        self._tree = Tree(fanout)
        self._peers: dict[str, Handshake] = {}
        self._room = asyncio.Condition()
        """Guards `_tree`; told whenever somebody may have room."""
        self._turns = itertools.count()

    def _begin(self, digest: str) -> None:
        """Forget who has another version than `digest`."""
        if digest != self._digest:
            self._digest, self._tree, self._peers = digest, Tree(self._fanout), {}

    async def joined(self, digest: str, handshake: Handshake) -> None:
        """Let a receiver that has proven the version `digest` pass it on."""
        async with self._room:
            self._begin(digest)
            self._peers[handshake.name] = handshake
            self._tree.add(handshake.name)
            self._room.notify_all()

    @contextlib.asynccontextmanager
    async def sender(self, digest: str) -> AsyncIterator[Handshake | None]:
        """Wait for a sender of the version `digest` with room and hold a place at it; None = the publisher."""
        async with self._room:
            self._begin(digest)
            tree = self._tree
            while (name := tree.take()) is None:
                await self._room.wait()
        try:
            yield self._peers.get(name)
        finally:
            async with self._room:
                tree.give_back(name)
                self._room.notify_all()

    async def stream(self, peer: Handshake) -> StreamSource | None:
        """Return a stream of the version from `peer`; None when it gives none, and is asked no more."""
        try:
            answer = await peer.client.call("weights_relay", self._digest, self._encrypted, timeout=RELAY_SECONDS)
        except RLJobError as error:
            answer = error
        if isinstance(answer, StreamSource):
            return answer
        await self.failed(peer, str(answer))
        return None

    async def failed(self, peer: Handshake, reason: str) -> None:
        """Ask `peer` no more for this version."""
        logger.warning("%s does not pass the weights on, the publisher gives them: %s", peer.name, reason)
        async with self._room:
            self._tree.drop(peer.name)
            self._peers.pop(peer.name, None)
            self._room.notify_all()

    async def for_joiner(self, digest: str) -> StreamSource | None:
        """Return a stream of the committed version from the next receiver that serves it; None when there is none."""
        peers: Sequence[Handshake] = [one for one in self._peers.values() if one.state is HandshakeState.ACKED]
        if digest != self._digest or not peers:
            return None
        return await self.stream(peers[next(self._turns) % len(peers)])
