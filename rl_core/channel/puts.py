"""Sends items to the channel server: small ones in one message, large ones through segments of shared memory that the server owns.

A large put reserves room, copies the large parts into segments on a copy thread, and hands the item over. Parts that the producer has written
into memory from `allocate` are not copied. To keep the order of puts, the server grants room to the next put of the same process and key only
after the item was handed over. Items are sent in messages if the server does not share memory with this process. Used by `client`.
"""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.api.errors import InfrastructureError
from rl_core.channel import payload
from rl_core.channel.backend import PutRequest
from rl_core.messages.channel import Key, Room, SegmentPart
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.rpc import RpcClient
from rl_core.transports.shared_memory import LentMemory, copy_into

Future = concurrent.futures.Future
MARGIN = 5.0
"""Seconds by which the RPC timeout exceeds the server's own deadline, whose error is more specific."""
COPY_THREADS = 2
PIECE_BYTES = 16 * 2**20
"""Bytes that a copy thread copies at a time, if two threads copy one item."""


class PutSender:
    """Sends the puts of one client. It owns the threads that copy large items."""

    def __init__(self, rpc: RpcClient) -> None:
        """Send through `rpc`, the connection to the channel server."""
        self.rpc = rpc
        self.copier = concurrent.futures.ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="rljob-channel-copy")

    def put(
        self, channel: str, parts: list[Any], request: PutRequest, keys: Sequence[Key] | None = None
    ) -> "Future[None]":
        """Return a future that is done when the server has accepted the encoded item of `request`, under each of `keys`.

        `keys` None means the key of the request.
        """
        keys = [request.key] if keys is None else keys
        if self.rpc.shares_memory and any(payload.needs_segment(memoryview(part).nbytes) for part in parts):
            return LargePut(self, channel, parts, request, keys).future
        inline = [payload.inline(part) for part in parts]
        timeout = request.timeout + MARGIN
        calls = [
            self.rpc.start_call(
                "put", (channel, key, request.weight, inline, request.timeout, request.nowait), {}, timeout=timeout
            )
            for key in keys
        ]
        if len(calls) == 1:
            return calls[0]
        combined: Future[None] = Future()
        chain(calls, combined)
        return combined


class LargePut:
    """A put through shared memory: reserve -> copy what does not lie in lent memory -> hand over. An item for several keys is copied once."""

    def __init__(
        self, sender: PutSender, channel: str, parts: list[Any], request: PutRequest, keys: Sequence[Key]
    ) -> None:
        """Reserve room under each of `keys` for the encoded `parts` of an item.

        The copy begins when the server has granted the room under all keys.
        """
        self.future: Future[None] = Future()
        self._sender = sender
        self._parts = parts
        self._request = request
        self._placed = [placed(part, request.lent) for part in parts]
        """By part: where it lies in memory of the server; None if it must be sent or copied."""
        sizes = [memoryview(part).nbytes for part in parts]
        shared = (sizes, request.timeout, request.nowait)
        # The item under the other keys uses the memory of the first one.
        needs_memory = [[place is None for place in self._placed], *[[False] * len(parts)] * (len(keys) - 1)]
        self._granted = [
            sender.rpc.start_call("reserve", (channel, key, *shared, needs), {}, timeout=request.timeout + MARGIN)
            for key, needs in zip(keys, needs_memory, strict=True)
        ]
        self.future.add_done_callback(lambda future: self._cancel() if future.cancelled() else None)
        when_all(self._granted, self._all_granted)

    def _cancel(self) -> None:
        for granted in self._granted:
            granted.cancel()

    def _all_granted(self) -> None:
        """Start the copy on another thread, because it would block the I/O thread for too long."""
        error = next((e for granted in self._granted if not granted.cancelled() and (e := granted.exception())), None)
        rooms = [granted.result() for granted in self._granted if not granted.cancelled() and not granted.exception()]
        if len(rooms) == len(self._granted):
            try:
                self._sender.copier.submit(self._write, rooms)
                return
            except RuntimeError:
                error = InfrastructureError("the item was not put: the client was closed")
        self._abort(rooms)
        if error is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def _abort(self, rooms: Sequence[Room]) -> None:
        for room in rooms:
            self._sender.rpc.start_call("abort", (room.ticket,), {}, idempotent=True)

    def _write(self, rooms: Sequence[Room]) -> None:
        rpc = self._sender.rpc
        try:
            copier = self._sender.copier
            parts = [
                place or fill(copier, segment, part)
                for place, segment, part in zip(self._placed, rooms[0].segments, self._parts, strict=True)
            ]
            if self.future.cancelled():
                self._abort(rooms)
                return
            timeout = self._request.timeout + MARGIN
            # The room with the memory is handed over last, because the server then takes the memory from this process. `waits` is set
            # because puts that wait at the server for this one may have taken all the credit.
            accepted = [
                rpc.start_call("hand_over", (room.ticket, self._request.weight, parts), {}, timeout=timeout, waits=True)
                for room in reversed(rooms)
            ]
            chain(accepted, self.future)
        except Exception as error:  # noqa: BLE001 - the future carries it; the room must not stay taken
            self._abort(rooms)
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


def placed(part: Any, lent: Sequence[LentMemory]) -> SegmentPart | None:
    """Return the position of `part`, a contiguous buffer, in the memory of `lent` that contains all of it; None if none does."""
    for memory in lent:
        if (offset := memory.offset_of(part)) is not None:
            loan, nbytes = memory.loan, memoryview(part).nbytes
            return SegmentPart(segment=loan.segment, generation=loan.generation, nbytes=nbytes, offset=offset)
    return None


def fill(copier: concurrent.futures.Executor, segment: SegmentPart | None, part: Any) -> payload.Part:
    """Return `part` in the form in which it is sent: copied into `segment`, or inline if that is None. A free thread of `copier` helps to copy."""
    if segment is None:
        return payload.inline(part)
    source = memoryview(part).cast("B")
    target = ProcessSharedMemory.shared().reader.view(segment.segment, 0, source.nbytes)
    begins = iter(range(0, source.nbytes, PIECE_BYTES))  # two threads may take from it

    def copy_pieces() -> None:
        for begin in begins:
            end = begin + PIECE_BYTES
            copy_into(target[begin:end], source[begin:end])

    helper = None
    if source.nbytes > PIECE_BYTES and len(os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(RuntimeError):  # the client is being closed
            helper = copier.submit(copy_pieces)
    copy_pieces()
    if helper is not None and not helper.cancel():  # it has not begun while the other thread copies another item
        helper.result()
    return segment


def when_all(futures: Sequence["Future[Any]"], call: Callable[[], None]) -> None:
    """Call `call` when all `futures` have ended, on the thread on which the last one ends."""
    unfinished, lock = len(futures), threading.Lock()

    def ended(_: "Future[Any]") -> None:
        nonlocal unfinished
        with lock:
            unfinished -= 1
            is_last = unfinished == 0
        if is_last:
            call()

    for future in futures:
        future.add_done_callback(ended)


def chain(inner: Sequence["Future[Any]"], outer: "Future[None]") -> None:
    """Complete `outer` when all of `inner` have ended, with the first of their errors if there is one. If `outer` is cancelled, cancel them."""

    def all_ended() -> None:
        if outer.cancelled() or any(future.cancelled() for future in inner) or not outer.set_running_or_notify_cancel():
            return
        error = next((error for future in inner if (error := future.exception()) is not None), None)
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(None)

    def cancel(completed: "Future[None]") -> None:
        for future in inner if completed.cancelled() else ():
            future.cancel()

    outer.add_done_callback(cancel)
    when_all(inner, all_ended)
