"""The channel server: one process that holds all channels of a job. `core` has the rules; payloads are never decoded.

RPC handlers run on the I/O thread, never block, and answer when the core calls back. Large payloads are in shared-memory segments of this
process: a producer asks for memory (`reserve`, or `allocate` before), writes, and hands the item over, so the death of a producer loses nothing
that was accepted. The arrays of a consumer keep their segment until the last of them is deleted.
"""

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_core.api.errors import ChannelClosed, ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.channel import payload
from rl_core.channel.core import ChannelCore
from rl_core.channel.model import Delivery, Put, Take
from rl_core.channel.rights import RUNNER_METHODS, ChannelRights
from rl_core.messages.channel import ChannelOptions, Key, Room, SegmentPart, ServerStats
from rl_core.messages.rpc import PackedError
from rl_core.plan.groups import BUILT_IN, GroupKind
from rl_core.transports import rpc_wire
from rl_core.transports.curve import KeyRing
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.rpc import IncomingCall, Peer, RpcServer, inline
from rl_core.transports.sockets import IoThread, Timer

logger = logging.getLogger(__name__)

_MAX_UNDOS = 1_024


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Room that a producer was granted and has not filled."""

    core: ChannelCore
    put: Put
    peer: Peer
    room: Room


class ChannelServer:
    """Serves the channels of a job."""

    def __init__(
        self,
        bind: str,
        keys: KeyRing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
        kinds: Mapping[str, GroupKind] = BUILT_IN,
    ) -> None:
        """Prepare to serve at `bind`; `start` listens.

        `keys` None serves without authentication, on loopback. `clock` returns seconds, by which deadlines are measured. `kinds` are
        the groups of the job, whose keys may use the channels as they say.
        """
        self._clock = clock
        self._rights = ChannelRights(kinds) if keys is not None else None
        """None without keys: then all may do everything."""
        self._channels: dict[str, ChannelCore] = {}
        self._awaited: dict[str, list[tuple[float, IncomingCall]]] = {}
        """Calls of `connect` for channels that do not exist, with their deadlines."""
        self._reservations: dict[int, _Reservation] = {}
        self._tickets = itertools.count(1)
        self._undos: dict[Peer, OrderedDict[int, Callable[[], object]]] = {}
        """Request id -> function that undoes an answered request, for callers that have cancelled it meanwhile."""
        self._members: dict[str, Peer] = {}
        self._timer: Timer | None = None
        self._timer_deadline = math.inf
        self._io = IoThread.shared()
        self._memory = ProcessSharedMemory.shared(identity.uid if identity is not None else "")
        names = sorted(RUNNER_METHODS)
        self._rpc = RpcServer(
            bind,
            {name: inline(partial(self._timely, name, getattr(self, f"_{name}"))) for name in names},
            keys,
            identity,
            service="channel",
            allowed=self._rights.methods if self._rights is not None else None,
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
        """Listen and serve; return self. Raises ConfigError when the port is in use."""
        self._rpc.start()
        return self

    def close(self) -> None:
        """Stop serving. Stored items are lost."""
        self._rpc.close()
        self._memory.store.release_holder(self)

    def stats(self) -> ServerStats:
        """Return the stats of all channels, of the transport and of the shared memory."""
        stats: ServerStats = self._io.run(self._all_stats)
        return stats

    # --- everything below runs on the I/O thread ---

    def _timely(self, method: str, handler: Callable[..., None], call: IncomingCall, *args: Any) -> None:
        """Handle a request, after ending all operations whose deadline has passed, so that the answer does not depend on them."""
        if self._rights is not None:
            self._rights.check(call.caller.group if call.caller is not None else "", method, args)
        self._tick_if_due()
        handler(call, *args)
        self._arm()

    def _tick_if_due(self) -> None:
        now = self._clock()
        if now < self._timer_deadline:
            return
        for core in self._channels.values():
            core.tick(now)
        for name, waiting in list(self._awaited.items()):
            for entry in [entry for entry in waiting if entry[0] <= now]:
                self._await_no_more(name, entry)
                entry[1].on_cancel = None
                entry[1].fail(
                    DeadlineExceeded(f"channel {name!r} was not created in time; known: {sorted(self._channels)}")
                )
        self._timer_deadline = math.inf

    def _arm(self) -> None:
        next_deadline = min((core.next_due() for core in self._channels.values()), default=math.inf)
        next_deadline = min(
            [next_deadline, *(deadline for waiting in self._awaited.values() for deadline, _ in waiting)]
        )
        if next_deadline == self._timer_deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline = next_deadline
        if next_deadline < math.inf:
            self._timer = self._io.call_at(self._io.clock() + max(0.0, next_deadline - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tick_if_due()
        self._timer_deadline = math.inf
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
            call.on_cancel = self._undo(call, lambda: self._await_no_more(name, entry))

    def _await_no_more(self, name: str, entry: tuple[float, IncomingCall]) -> None:
        self._awaited[name].remove(entry)
        if not self._awaited[name]:
            del self._awaited[name]

    def _undo(self, call: IncomingCall, undo: Callable[[], None]) -> Callable[[], None]:
        """Return the function that undoes a waiting request if its caller cancels it or is lost."""

        def cancelled() -> None:
            call.on_cancel = None
            undo()
            call.fail(ChannelClosed("cancelled by the caller"))
            self._arm()

        return cancelled

    # --- putting ---

    def _put(
        self, call: IncomingCall, channel: str, key: Key, weight: float, parts: list[Any], timeout: float, nowait: bool
    ) -> None:
        """Accept an item whose parts came with the message."""
        core, now, nbytes = self._core(channel), self._clock(), payload.size(parts)
        if payload.loans(parts):
            raise ConfigError("a put must bring its parts with it, got one in shared memory; reserve room for it")

        def store(put: Put) -> None:
            call.on_cancel = None
            core.store(self._clock(), put, parts, weight)
            call.reply(None)

        put = Put(call.peer, key, nbytes, store, call.fail, now + timeout, now)
        call.on_cancel = self._undo(call, lambda: core.cancel_put(self._clock(), put))
        core.put(now, put, nowait=nowait)

    def _reserve(
        self,
        call: IncomingCall,
        channel: str,
        key: Key,
        sizes: list[int],
        timeout: float,
        nowait: bool,
        needs_memory: list[bool],
    ) -> None:
        """Grant room for an item whose parts have these `sizes`, as soon as there is some.

        `needs_memory` says for each part whether the server lends a segment for it if it is large. It is False for parts that lie in memory
        from `allocate`, and for all parts if another reservation of the same item asks for their memory. A part that gets no segment and
        lies in none is sent with `hand_over`.
        """
        core, now = self._core(channel), self._clock()
        parts = [(size, needs and payload.needs_segment(size)) for size, needs in zip(sizes, needs_memory, strict=True)]

        def grant(put: Put) -> None:
            room = Room(
                ticket=next(self._tickets),
                segments=tuple(self._segment(call.peer, size) if shared else None for size, shared in parts),
            )
            self._reservations[room.ticket] = _Reservation(core, put, call.peer, room)
            call.on_cancel = None
            self._remember(call, partial(self._release_reservation, room.ticket))
            call.reply(room)

        put = Put(call.peer, key, sum(sizes), grant, call.fail, now + timeout, now)
        call.on_cancel = self._undo(call, lambda: core.cancel_put(self._clock(), put))
        core.put(now, put, nowait=nowait)

    def _allocate(self, call: IncomingCall, channel: str, nbytes: int) -> None:
        """Lend the caller a segment, into which it writes arrays before it puts them; reply None if it cannot be lent one.

        `channel` is for the check of rights only. The segment is freed when the caller releases it, cancels the call or is lost, unless an
        item holds it.
        """
        part = self._segment(call.peer, nbytes)
        if part is not None:
            self._remember(call, partial(self._memory.store.release, part.segment, part.generation, call.peer.loans))
        call.reply(part)

    def _segment(self, peer: Peer, size: int) -> SegmentPart | None:
        """Lend a segment of at least `size` bytes to the client `peer`, which writes to it. Return the position of its first `size` bytes.

        The loan ends when the client releases the segment or is lost. Returns None if the client cannot map memory of this process, for
        example because it is on another host, and if shared memory is full.
        """
        if not peer.loans.lends:
            return None
        segment = self._memory.store.lend(size, peer.loans)
        return (
            None if segment is None else SegmentPart(segment=segment.name, generation=segment.generation, nbytes=size)
        )

    def _hand_over(self, call: IncomingCall, ticket: int, weight: float, parts: list[Any]) -> None:
        """Store the item for which the reservation `ticket` was made, and end the reservation.

        Each of `parts` is in a segment of the reservation, in other memory that is lent to the producer, or inline. From now on the server
        holds these segments. The producer does not hold those of the reservation any more, but keeps memory from `allocate` until it
        releases it. Raises InfrastructureError if the reservation does not exist any more or if a part lies in memory that the producer does
        not hold, ConfigError if the size differs from the reserved one, and ChannelClosed. The reservation ends with these errors too.
        """
        reservation = self._reservation(call, ticket)
        if reservation is None:
            raise InfrastructureError("the reservation of this item was given up: its producer was taken for lost")
        if not all(self._holds(call.peer, part) for part in parts if isinstance(part, SegmentPart)):
            self._release_reservation(ticket)
            raise InfrastructureError("the item lies in memory that is not lent to its producer any more; put it again")
        if payload.size(parts) != reservation.put.nbytes:
            self._release_reservation(ticket)
            raise ConfigError(
                f"the item has {payload.size(parts)} bytes in {len(parts)} parts, the reservation was for {reservation.put.nbytes} bytes"
            )
        del self._reservations[ticket]
        store = self._memory.store
        for loan in payload.loans(parts):
            store.share(loan.segment, loan.generation, self)
        self._release_segments(reservation)
        try:
            reservation.core.store(self._clock(), reservation.put, parts, weight)
        except ChannelClosed:
            self._drop(parts)
            raise
        call.reply(None)

    def _holds(self, peer: Peer, part: SegmentPart) -> bool:
        """Return whether `part` lies within a segment that is lent to `peer`, for writing or for reading."""
        size = self._memory.store.size_held(part.segment, part.generation, peer.loans)
        return 0 <= part.offset <= part.offset + part.nbytes <= size

    def _abort(self, call: IncomingCall, ticket: int) -> None:
        if self._reservation(call, ticket) is not None:
            self._release_reservation(ticket)
        call.reply(None)

    def _reservation(self, call: IncomingCall, ticket: int) -> _Reservation | None:
        """Return the reservation of a ticket, None when the caller has none of that number."""
        reservation = self._reservations.get(ticket)
        return reservation if reservation is not None and reservation.peer is call.peer else None

    def _release_reservation(self, ticket: int) -> None:
        reservation = self._reservations.pop(ticket, None)
        if reservation is not None:
            self._release_segments(reservation)
            reservation.core.cancel_put(self._clock(), reservation.put)

    def _release_segments(self, reservation: _Reservation) -> None:
        """End the producer's hold on the segments of a reservation. A segment that nobody holds is free."""
        for loan in payload.loans(reservation.room.segments):
            self._memory.store.release(loan.segment, loan.generation, reservation.peer.loans)

    def _drop(self, parts: list[payload.Part]) -> None:
        for loan in payload.loans(parts):
            self._memory.store.release(loan.segment, loan.generation, self)

    # --- taking ---

    def _take(
        self, call: IncomingCall, channel: str, key: Key, timeout: float, nowait: bool, target: float | None, most: int,
        allow_oversize: bool, receipts: dict[str, list[str]],
    ) -> None:  # fmt: skip
        self._confirm_all(receipts)
        core, now = self._core(channel), self._clock()

        def hand_out(take: Take, deliveries: list[Delivery]) -> None:
            call.on_cancel = None
            undo = partial(self._take_back, call.peer, core, take)
            self._remember(call, undo)
            if not call.reply([self._lend(call.peer, delivery) for delivery in deliveries]):
                undo()  # more than a message carries

        take = Take(
            call.peer, key, hand_out, call.fail, now + timeout, now, target=target, most=most, allow_oversize=allow_oversize
        )  # fmt: skip
        call.on_cancel = self._undo(call, lambda: core.cancel_take(self._clock(), take))
        core.take(now, take, nowait=nowait)

    def _lend(self, peer: Peer, delivery: Delivery) -> list[Any]:
        for loan in payload.loans(delivery.payload):
            self._memory.store.share(loan.segment, loan.generation, peer.loans)
        return [delivery.token, delivery.payload]

    def _remember(self, call: IncomingCall, undo: Callable[[], object]) -> None:
        undos = self._undos.setdefault(call.peer, OrderedDict())
        undos[call.id] = undo
        if len(undos) > _MAX_UNDOS:
            undos.popitem(last=False)

    def _late_cancel(self, peer: Peer, number: int) -> None:
        """Undo a request that was answered and whose caller gave up meanwhile: the items or the room are unused."""
        undo = self._undos.get(peer, OrderedDict()).pop(number, None)
        if undo is not None:
            undo()
            self._arm()

    def _take_back(self, peer: Peer, core: ChannelCore, take: Take) -> None:
        for item in take.out.values():
            for loan in payload.loans(item.payload):
                self._memory.store.release(loan.segment, loan.generation, peer.loans)
        core.cancel_take(self._clock(), take)

    def _confirm(self, call: IncomingCall, receipts: dict[str, list[str]]) -> None:
        self._confirm_all(receipts)
        call.reply(None)

    def _confirm_all(self, receipts: dict[str, list[str]]) -> None:
        for channel, tokens in receipts.items():
            if channel in self._channels:  # receipts of an earlier server's channel mean nothing here
                self._channels[channel].confirm(self._clock(), tokens)

    def _requeue(self, call: IncomingCall, channel: str, tokens: list[str]) -> None:
        self._core(channel).requeue(self._clock(), tokens)
        call.reply(None)

    def _move(self, call: IncomingCall, channel: str, moves: list[tuple[Key, Key | None]]) -> None:
        self._core(channel).move(self._clock(), moves)
        call.reply(None)

    # --- looking, ending, members ---

    def _depth(self, call: IncomingCall, channel: str, key: Key) -> None:
        call.reply(self._core(channel).depth(key))

    def _full(self, call: IncomingCall, channel: str, key: Key) -> None:
        call.reply(self._core(channel).is_full(key))

    def _stats(self, call: IncomingCall, channel: str) -> None:
        call.reply(self._core(channel).stats(self._clock()))

    def _register(self, call: IncomingCall, channel: str, registration: int) -> None:
        self._core(channel).register_producer(call.peer, registration)
        call.reply(None)

    def _done(self, call: IncomingCall, channel: str, registration: int) -> None:
        self._core(channel).done_producing(self._clock(), call.peer, registration)
        call.reply(None)

    def _close(self, call: IncomingCall, channel: str, key: Key | None, error: PackedError | None) -> None:
        rebuilt = rpc_wire.rebuild_error(error, method="close", peer=call.peer.name) if error is not None else None
        self._core(channel).close(self._clock(), key, rebuilt)
        call.reply(None)

    def _server_stats(self, call: IncomingCall) -> None:
        call.reply(self._all_stats())

    def _all_stats(self) -> ServerStats:
        now = self._clock()
        return ServerStats(
            channels={name: core.stats(now) for name, core in self._channels.items()},
            transport=dict(self._rpc.counters),
            memory=self._memory.store.stats(),
        )

    def _joined(self, peer: Peer) -> None:
        """A new incarnation of a member replaces the old one, whose items go back at once."""
        if peer.caller is None:
            return
        previous = self._members.get(peer.name)
        if (
            previous is not None
            and previous is not peer
            and previous.caller is not None
            and previous.caller.incarnation < peer.caller.incarnation
        ):
            self._release(previous)
        self._members[peer.name] = peer

    def _peer_lost(self, peer: Peer) -> None:
        self._release(peer)
        self._undos.pop(peer, None)
        if self._members.get(peer.name) is peer:
            del self._members[peer.name]

    def _release(self, peer: Peer) -> None:
        for core in self._channels.values():
            core.client_lost(self._clock(), peer)
        # The room is released after the waiting puts of the peer are cancelled. Otherwise it would be granted to one of them.
        for ticket in [ticket for ticket, reservation in self._reservations.items() if reservation.peer is peer]:
            self._release_reservation(ticket)
        self._arm()
