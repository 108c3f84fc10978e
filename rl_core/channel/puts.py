"""Sends items to the channel server: small ones in one message, large ones through segments of shared memory that the server owns.

A large put reserves room, copies into the server's segments on a copy thread, and hands the item over. The server serves a process's next
put of the same key only after that, so the order of puts is kept. Used by `client`.
"""

import concurrent.futures
from typing import Any

from rl_core.api.errors import InfrastructureError
from rl_core.channel import payload
from rl_core.channel.backend import PutRequest
from rl_core.messages.channel import Room, SegmentPart
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.rpc import RpcClient
from rl_core.transports.shared_memory import copy_into

Future = concurrent.futures.Future
MARGIN = 5.0
"""Seconds by which the RPC timeout exceeds the server's own deadline, whose error is more specific."""
COPY_THREADS = 2


class PutSender:
    """Sends the puts of one client. It owns the threads that copy large items."""

    def __init__(self, rpc: RpcClient) -> None:
        """Send through `rpc`, the connection to the channel server."""
        self.rpc = rpc
        self.copier = concurrent.futures.ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="rljob-channel-copy")

    def put(self, channel: str, parts: list[Any], request: PutRequest) -> "Future[None]":
        """Return a future that is done when the server has accepted the encoded item of `request`."""
        if self.rpc.shares_memory and any(payload.needs_segment(memoryview(part).nbytes) for part in parts):
            return LargePut(self, channel, parts, request).future
        inline = [payload.inline(part) for part in parts]
        args = (channel, request.key, request.weight, inline, request.timeout, request.nowait)
        return self.rpc.start_call("put", args, {}, timeout=request.timeout + MARGIN)


class LargePut:
    """A put through shared memory: reserve -> copy -> hand over."""

    def __init__(self, sender: PutSender, channel: str, parts: list[Any], request: PutRequest) -> None:
        """Reserve room for the encoded `parts` of an item. The copy follows when the server has granted it."""
        self.future: Future[None] = Future()
        self._uplink = sender
        self._parts = parts
        self._request = request
        sizes = [memoryview(part).nbytes for part in parts]
        args = (channel, request.key, sizes, request.timeout, request.nowait)
        granted = sender.rpc.start_call("reserve", args, {}, timeout=request.timeout + MARGIN)
        self.future.add_done_callback(lambda done: granted.cancel() if done.cancelled() else None)
        granted.add_done_callback(self._granted)

    def _granted(self, granted: "Future[Room]") -> None:
        """Leave the I/O thread, which may not be held for as long as a copy takes."""
        if granted.cancelled():
            return
        error = granted.exception()
        if error is None:
            try:
                self._uplink.copier.submit(self._write, granted.result())
            except RuntimeError:
                error = InfrastructureError("the item was not put: the client was closed")
        if error is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def _write(self, room: Room) -> None:
        rpc = self._uplink.rpc
        try:
            parts = [fill(segment, part) for segment, part in zip(room.segments, self._parts, strict=True)]
            if self.future.cancelled():
                rpc.start_call("abort", (room.ticket,), {}, idempotent=True)
                return
            args, timeout = (room.ticket, self._request.weight, parts), self._request.timeout + MARGIN
            # `waits`: puts that stand behind this one at the server may have taken all the credit
            _chain(rpc.start_call("hand_over", args, {}, timeout=timeout, waits=True), self.future)
        except Exception as error:  # noqa: BLE001 - the future carries it; the room must not stay taken
            rpc.start_call("abort", (room.ticket,), {}, idempotent=True)
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


def fill(segment: SegmentPart | None, part: Any) -> payload.Part:
    """Return how `part` stands on the wire: copied into `segment`, or inline when there is none."""
    if segment is None:
        return payload.inline(part)
    view = memoryview(part).cast("B")
    copy_into(ProcessSharedMemory.shared().reader.view(segment.segment, 0, view.nbytes), view)
    return segment


def _chain(inner: "Future[Any]", outer: "Future[Any]") -> None:
    """Let `outer` end as `inner` does, and cancel `inner` with it."""

    def copy(done: "Future[Any]") -> None:
        if done.cancelled() or not outer.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())

    inner.add_done_callback(copy)
    outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
