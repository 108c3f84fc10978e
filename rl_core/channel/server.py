"""The channel server: all channels of a job, one process, rules in `core`, payloads never decoded (runtime.md 5).

Its RPC handlers are inline: they run on the I/O thread, never block, and answer when the core says so. Large payloads lie
in segments this process owns: a producer asks for room (`reserve`), writes, and hands over (`put` with its ticket), so a
producer's death loses nothing accepted; a consumer's views hold the segment until the last of them dies.
"""

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from rl_core.api.errors import ChannelClosed, ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.channel import payload
from rl_core.channel.core import ChannelCore
from rl_core.channel.model import ChannelOptions, Delivered, Put, Take
from rl_core.messages.rpc import PackedError
from rl_core.transports import rpc_wire
from rl_core.transports.curve import KeyRing
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import IncomingCall, Peer, RpcServer, inline
from rl_core.transports.sockets import IoThread, Timer

logger = logging.getLogger(__name__)

_ELASTIC_METHODS = frozenset(
    {"create", "connect", "put", "reserve", "abort", "take", "confirm", "ack", "nack", "extend", "dead"}
    | {"depth", "full", "stats"}
)
_ACTOR_METHODS = _ELASTIC_METHODS | {"register", "done"}
ALLOWED_METHODS = {
    "runner": _ACTOR_METHODS | {"close", "consumer_lost", "server_stats"},
    "actor": _ACTOR_METHODS,
    **dict.fromkeys(("rollout", "env"), _ELASTIC_METHODS),
}
"""Who comes and goes is no producer that a channel waits for, and the runner alone closes channels (protocol.md 2)."""
_RECENT = 1_024
SPARE_BYTES = 8 * 2**20
"""Up to this size a producer is lent a segment in advance."""


class ChannelServer:
    """Serves channels at `bind`; `clock` (seconds, rising) tells deadlines and leases. Raises ConfigError on `start`."""

    def __init__(
        self,
        bind: str,
        keys: KeyRing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
    ) -> None:
        self._clock = clock
        self._channels: dict[str, ChannelCore] = {}
        self._awaited: dict[str, list[tuple[float, IncomingCall]]] = {}
        self._tickets: dict[int, tuple[ChannelCore, Put, Peer, list[payload.Part]]] = {}
        self._numbers = itertools.count(1)
        self._undos: dict[Peer, OrderedDict[int, Callable[[], object]]] = {}
        """How to take back what an answer gave, by request id: its caller may have given it up meanwhile."""
        self._members: dict[str, Peer] = {}
        self._timer: Timer | None = None
        self._due = math.inf
        self._io = IoThread.shared()
        self._memory = SharedMemory.shared(identity.uid if identity is not None else "")
        names = sorted(ALLOWED_METHODS["runner"])
        self._rpc = RpcServer(
            bind,
            {name: inline(partial(self._timely, getattr(self, f"_{name}"))) for name in names},
            keys,
            identity,
            service="channel",
            allowed=ALLOWED_METHODS if keys is not None else None,
            share_memory=True,
            on_peer=self._joined,
            on_peer_lost=self._peer_lost,
            on_late_cancel=self._late_cancel,
        )

    @property
    def address(self) -> str:
        """Return `tcp://host:port` once started."""
        return self._rpc.address

    def start(self) -> "ChannelServer":
        """Bind and serve; returns self."""
        self._rpc.start()
        return self

    def close(self) -> None:
        """Stop serving; stored items are gone."""
        self._rpc.close()
        self._memory.store.release_holder(self)

    def consumer_lost(self, name: str, incarnation: tuple[int, int] | None = None) -> int:
        """Return at once what the member `group:rank` holds (None = any incarnation) and tell how many connections that were."""
        return int(self._io.run(lambda: self._lose(name, incarnation)))

    def stats(self) -> dict[str, Any]:
        """Return the stats of all channels by name, and the transport's counters."""
        return dict(self._io.run(self._all_stats))

    # --- everything below runs on the I/O thread ---

    def _timely(self, handler: Callable[..., None], call: IncomingCall, *args: Any, **kwargs: Any) -> None:
        """Do what time brought before each request, so that no answer rests on an expired lease."""
        self._tick_if_due()
        handler(call, *args, **kwargs)
        self._arm()

    def _tick_if_due(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        for core in self._channels.values():
            core.tick(now)
        for name, waiting in list(self._awaited.items()):
            for entry in [entry for entry in waiting if entry[0] <= now]:
                waiting.remove(entry)
                entry[1].on_cancel = None
                entry[1].fail(
                    DeadlineExceeded(f"channel {name!r} was not created in time; known: {sorted(self._channels)}")
                )
        self._due = math.inf

    def _arm(self) -> None:
        due = min((core.next_due() for core in self._channels.values()), default=math.inf)
        due = min([due, *(deadline for waiting in self._awaited.values() for deadline, _ in waiting)])
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        if due < math.inf:
            self._timer = self._io.call_at(self._io.clock() + max(0.0, due - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tick_if_due()
        self._due = math.inf
        self._arm()

    def _core(self, name: str) -> ChannelCore:
        core = self._channels.get(name)
        if core is None:
            raise ConfigError(f"channel {name!r} does not exist; it has {sorted(self._channels)}; create it first")
        return core

    def _create(self, call: IncomingCall, name: str, options: ChannelOptions) -> None:
        core = self._channels.get(name)
        if core is None:
            core = self._channels[name] = ChannelCore(name, options, on_drop=self._drop)
            for _, waiting in self._awaited.pop(name, []):
                waiting.on_cancel = None
                waiting.reply(options)
        options.check_equal(name, core.options)
        call.reply(core.options)

    def _connect(self, call: IncomingCall, name: str, timeout: float) -> None:
        if name in self._channels:
            call.reply(self._channels[name].options)
        else:
            entry = (self._clock() + timeout, call)
            self._awaited.setdefault(name, []).append(entry)
            call.on_cancel = self._undo(call, lambda: self._awaited[name].remove(entry))

    def _undo(self, call: IncomingCall, undo: Callable[[], None]) -> Callable[[], None]:
        """Return what to do when the caller of a waiting request gives up or is gone."""

        def cancelled() -> None:
            call.on_cancel = None
            undo()
            call.fail(ChannelClosed("cancelled by the caller"))
            self._arm()

        return cancelled

    # --- putting ---

    def _put(
        self,
        call: IncomingCall,
        channel: str,
        key: Any,
        shape: list[list[Any]],
        parts: list[Any],
        timeout: float,
        ticket: int | None = None,
        nowait: bool = False,
        ack: list[str] | None = None,
    ) -> None:
        """Accept the items of `shape` [(weight, number of parts)] together; `ack` (channel, token) ends a lease with them."""
        contents = payload.split(shape, parts)
        if ticket is not None:
            self._hand_over(call, ticket, contents, parts, ack)
            return
        core, now = self._core(channel), self._clock()
        self._check_spares(call.peer, parts)

        def store(put: Put) -> None:
            call.on_cancel = None
            self._take_over(call.peer, parts, parts)
            core.store(self._clock(), put, contents)
            self._end_lease(ack)
            call.reply(self._spare(call, parts))

        put = Put(call.peer, key, _sizes(contents), store, call.fail, now + timeout, now)
        call.on_cancel = self._undo(call, lambda: core.cancel_put(self._clock(), put))
        core.put(now, put, nowait=nowait)

    def _reserve(
        self, call: IncomingCall, channel: str, key: Any, sizes: list[list[int]], timeout: float, nowait: bool = False
    ) -> None:
        """Answer [ticket, segments] when there is room for items of parts of these `sizes`.

        `segments` holds [name, generation, size] or None (send it inline) for each part.
        """
        core, now = self._core(channel), self._clock()

        def grant(put: Put) -> None:
            segments = [self._segment(call.peer, size) for item in sizes for size in item]
            ticket = next(self._numbers)
            self._tickets[ticket] = (core, put, call.peer, [part for part in segments if part is not None])
            call.on_cancel = None
            self._remember(call, partial(self._give_up_ticket, ticket))
            call.reply([ticket, segments])

        put = Put(call.peer, key, tuple(map(sum, sizes)), grant, call.fail, now + timeout, now)
        call.on_cancel = self._undo(call, lambda: core.cancel_put(self._clock(), put))
        core.put(now, put, nowait=nowait)

    def _segment(self, peer: Peer, size: int) -> list[Any] | None:
        if not payload.needs_segment(size) or not peer.link.lends:
            return None
        segment = self._memory.store.lend(size, peer.link)
        return None if segment is None else [segment.name, segment.generation, size]

    def _hand_over(
        self,
        call: IncomingCall,
        ticket: int,
        contents: list[tuple[list[Any], float]],
        parts: list[Any],
        ack: list[str] | None,
    ) -> None:
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            raise InfrastructureError("the reservation of this item was given up: its producer was taken for lost")
        core, put, peer, segments = entry
        if _sizes(contents) != put.sizes or any(part not in segments for part in parts if isinstance(part, list)):
            self._tickets[ticket] = entry
            self._give_up_ticket(ticket)
            raise ConfigError(
                f"the items have {_sizes(contents)} bytes in {len(parts)} parts, the reservation was for {put.sizes} bytes"
            )
        self._take_over(peer, parts, segments)
        try:
            core.store(self._clock(), put, contents)
        except ChannelClosed:
            self._drop(parts)
            raise
        self._end_lease(ack)
        call.reply(self._spare(call, parts))

    def _end_lease(self, ack: list[str] | None) -> None:
        """Acknowledge the lease that a put ends; a stale one is counted, one of an earlier server's channel means nothing here."""
        if ack is not None and ack[0] in self._channels:
            self._channels[ack[0]].ack(self._clock(), ack[1])

    def _take_over(self, peer: Peer, parts: list[Any], lent: list[Any]) -> None:
        """Make the segments of an accepted payload the server's; its producer holds none of `lent` any more."""
        store = self._memory.store
        for spot in payload.placements(parts):
            store.share(spot.segment, spot.generation, self)
        for spot in payload.placements(lent):
            store.release(spot.segment, spot.generation, peer.link)

    def _check_spares(self, peer: Peer, parts: list[Any]) -> None:
        for part in parts:
            if isinstance(part, list) and not self._memory.store.holds(part[0], part[1], peer.link, part[2]):
                raise InfrastructureError(
                    "a segment of this item is not lent to its producer, which was taken for lost"
                )

    def _spare(self, call: IncomingCall, parts: list[Any]) -> list[Any] | None:
        """Return a segment for the next item like this one, so that its put needs one message; None if not worth it."""
        sizes = [part[2] for part in parts if isinstance(part, list)]
        link, store = call.peer.link, self._memory.store
        if len(sizes) != 1 or sizes[0] > SPARE_BYTES or not link.lends:
            return None
        segment = store.lend(sizes[0], link)
        if segment is None:
            return None
        self._remember(call, partial(store.release, segment.name, segment.generation, link))
        return [segment.name, segment.generation, segment.size]

    def _abort(self, call: IncomingCall, ticket: int) -> None:
        self._give_up_ticket(ticket)
        call.reply(None)

    def _give_up_ticket(self, ticket: int) -> None:
        entry = self._tickets.pop(ticket, None)
        if entry is not None:
            core, put, peer, segments = entry
            for spot in payload.placements(segments):
                self._memory.store.release(spot.segment, spot.generation, peer.link)
            core.cancel_put(self._clock(), put)

    def _drop(self, parts: list[payload.Part]) -> None:
        for spot in payload.placements(parts):
            self._memory.store.release(spot.segment, spot.generation, self)

    # --- taking ---

    def _take(
        self, call: IncomingCall, channel: str, key: Any, kind: Any, timeout: float, confirmed: dict[str, list[str]],
        target: float = 0.0, allow_oversize: bool = False, nowait: bool = False, most: int = 1,
    ) -> None:  # fmt: skip
        self._confirm_all(confirmed)
        core, now = self._core(channel), self._clock()

        def hand_out(take: Take, delivered: list[Delivered]) -> None:
            call.on_cancel = None
            undo = partial(self._take_back, call.peer, core, take)
            self._remember(call, undo)
            if not call.reply([self._lend(call.peer, entry) for entry in delivered]):
                undo()  # more than a message carries

        take = Take(
            call.peer, key, kind, hand_out, call.fail, now + timeout, now,
            target=target, allow_oversize=allow_oversize, most=most,
        )  # fmt: skip
        call.on_cancel = self._undo(call, lambda: core.cancel_take(self._clock(), take))
        core.take(now, take, nowait=nowait)

    def _lend(self, peer: Peer, delivered: Delivered) -> list[Any]:
        item = delivered.item
        for spot in payload.placements(item.payload):
            self._memory.store.share(spot.segment, spot.generation, peer.link)
        return [delivered.token, item.attempt, item.weight, item.payload]

    def _remember(self, call: IncomingCall, undo: Callable[[], object]) -> None:
        undos = self._undos.setdefault(call.peer, OrderedDict())
        undos[call.id] = undo
        if len(undos) > _RECENT:
            undos.popitem(last=False)

    def _late_cancel(self, peer: Peer, number: int) -> None:
        """The caller gave up a request that was answered: nobody got the items, the room or the segment."""
        undo = self._undos.get(peer, OrderedDict()).pop(number, None)
        if undo is not None:
            undo()
            self._arm()

    def _take_back(self, peer: Peer, core: ChannelCore, take: Take) -> None:
        for delivered in take.delivered:
            for spot in payload.placements(delivered.item.payload):
                self._memory.store.release(spot.segment, spot.generation, peer.link)
        core.cancel_take(self._clock(), take)

    def _confirm(self, call: IncomingCall, confirmed: dict[str, list[str]]) -> None:
        self._confirm_all(confirmed)
        call.reply(None)

    def _confirm_all(self, confirmed: dict[str, list[str]]) -> None:
        for channel, tokens in confirmed.items():
            if channel in self._channels:  # receipts of an earlier server's channel mean nothing here
                self._channels[channel].confirm(self._clock(), tokens)

    def _ack(self, call: IncomingCall, channel: str, token: str) -> None:
        call.reply(self._core(channel).ack(self._clock(), token))

    def _nack(self, call: IncomingCall, channel: str, token: str, delay: float, lost: bool = False) -> None:
        call.reply(self._core(channel).nack(self._clock(), token, delay=delay, lost=lost))

    def _extend(self, call: IncomingCall, channel: str, tokens: list[str], seconds: float | None) -> None:
        call.reply(self._core(channel).extend(self._clock(), tokens, seconds))

    def _dead(self, call: IncomingCall, channel: str, key: Any) -> None:
        answer = []
        for token, item in self._core(channel).dead_items(key):
            for spot in payload.placements(item.payload):
                self._memory.store.share(spot.segment, spot.generation, call.peer.link)
            answer.append([token, item.attempt, item.weight, item.payload])
        call.reply(answer)

    # --- looking, ending, members ---

    def _depth(self, call: IncomingCall, channel: str, key: Any) -> None:
        call.reply(self._core(channel).depth(key))

    def _full(self, call: IncomingCall, channel: str, key: Any) -> None:
        call.reply(self._core(channel).is_full(key))

    def _stats(self, call: IncomingCall, channel: str) -> None:
        call.reply(self._core(channel).stats(self._clock()))

    def _register(self, call: IncomingCall, channel: str, registration: int) -> None:
        self._core(channel).register_producer(call.peer, registration)
        call.reply(None)

    def _done(self, call: IncomingCall, channel: str, registration: int) -> None:
        self._core(channel).done_producing(self._clock(), call.peer, registration)
        call.reply(None)

    def _close(self, call: IncomingCall, channel: str, key: Any, error: PackedError | None) -> None:
        rebuilt = rpc_wire.rebuild_error(error, method="close", peer=call.peer.name) if error is not None else None
        self._core(channel).close(self._clock(), key, rebuilt)
        call.reply(None)

    def _consumer_lost(self, call: IncomingCall, name: str, incarnation: Any = None) -> None:
        call.reply(self._lose(name, tuple(incarnation) if incarnation is not None else None))

    def _server_stats(self, call: IncomingCall) -> None:
        call.reply(self._all_stats())

    def _all_stats(self) -> dict[str, Any]:
        now = self._clock()
        return {
            "channels": {name: core.stats(now) for name, core in self._channels.items()},
            "transport": dict(self._rpc.counters),
            "memory": self._memory.store.stats(),
        }

    def _lose(self, name: str, incarnation: tuple[Any, ...] | None) -> int:
        lost = [
            peer
            for peer in self._rpc.peers()
            if peer.caller is not None
            and peer.name == name
            and (incarnation is None or peer.caller.incarnation <= incarnation)
        ]
        for peer in lost:
            self._release(peer)
        return len(lost)

    def _joined(self, peer: Peer) -> None:
        """A new incarnation of a member replaces the old one, whose leases go back at once."""
        if peer.caller is None:
            return
        old = self._members.get(peer.name)
        if (
            old is not None
            and old is not peer
            and old.caller is not None
            and old.caller.incarnation < peer.caller.incarnation
        ):
            self._release(old)
        self._members[peer.name] = peer

    def _peer_lost(self, peer: Peer) -> None:
        self._release(peer)
        self._undos.pop(peer, None)
        if self._members.get(peer.name) is peer:
            del self._members[peer.name]

    def _release(self, peer: Peer) -> None:
        for ticket in [ticket for ticket, entry in self._tickets.items() if entry[2] is peer]:
            self._give_up_ticket(ticket)
        for core in self._channels.values():
            core.client_lost(self._clock(), peer)
        self._arm()


def _sizes(contents: list[tuple[list[Any], float]]) -> tuple[int, ...]:
    """Return the bytes of each item. Raises FrameError for a part that is none."""
    return tuple(sum(map(payload.size, parts)) for parts, _ in contents)
