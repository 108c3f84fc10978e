"""How items get to the channel server: small ones in one message, large ones through segments the server owns.

A large put reserves room, copies into the server's segments on a copy thread, and hands over. Where the server has lent a
segment in advance (`Spares`), the caller copies into that and one message is enough. `Lanes` keeps the program order of
puts per key meanwhile. Used by `client`.
"""

import concurrent.futures
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_core.api.errors import ChannelFull, DeadlineExceeded, FrameError, InfrastructureError
from rl_core.channel import payload
from rl_core.channel.model import Key
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient
from rl_core.transports.shared_memory import Placement, copy_into
from rl_core.transports.sockets import IoThread

Future = concurrent.futures.Future
MARGIN = 5.0
"""Seconds the transport waits beyond the server's own deadline, whose error tells more."""
NOWAIT_SECONDS = 0.2
"""How long a put that must not wait gives the one before it to be written."""
MAX_SPARES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how items are put."""

    channel: str
    key: Key
    shape: list[list[Any]]
    """(weight, number of parts) of each item."""
    timeout: float
    nowait: bool
    ack: list[str] | None
    """(channel, token) of a lease that ends with the put."""
    since: float
    """When the put began, on the clock of the I/O thread; `timeout` counts from here."""

    @property
    def lane(self) -> tuple[str, Key]:
        """Return what puts must keep their order in."""
        return self.channel, self.key

    @property
    def patience(self) -> float:
        """Return how many seconds the put may wait for the puts before it."""
        return min(self.timeout, NOWAIT_SECONDS) if self.nowait else self.timeout

    def left(self) -> float:
        """Return the seconds of `timeout` that are left."""
        return max(0.0, self.since + self.timeout - IoThread.shared().clock())

    def late(self) -> Exception:
        """Return the error of a put whose patience ended behind another put of this process."""
        text = f"channel {self.channel!r} key {self.key!r}: an earlier large put of this process still waits for room"
        return ChannelFull(text) if self.nowait else DeadlineExceeded(f"put on {text} after {self.timeout:g} s")


class LargePut:
    """reserve -> copy -> hand over. The lane is held until the hand-over is sent."""

    def __init__(self, uplink: "Uplink", parts: list[Any], target: Target) -> None:
        self.future: Future[None] = Future()
        self.target = target
        self._uplink = uplink
        self._parts = parts

    def start(self) -> None:
        """Ask for room; the rest follows from the answer."""
        target = self.target
        sizes = iter([memoryview(part).nbytes for part in self._parts])
        by_item = [list(itertools.islice(sizes, count)) for _, count in target.shape]
        left = target.left()
        args = (target.channel, target.key, by_item, left)
        granted = self._uplink.rpc.start_call("reserve", args, {"nowait": target.nowait}, timeout=left + MARGIN)
        self.future.add_done_callback(lambda done: granted.cancel() if done.cancelled() else None)
        granted.add_done_callback(self._granted)

    def _granted(self, granted: "Future[Any]") -> None:
        if granted.cancelled() or granted.exception() is not None:
            self._end(None if granted.cancelled() else granted.exception())
            return
        try:
            self._uplink.copier.submit(self._write, *granted.result())
        except RuntimeError:
            self._end(InfrastructureError("the item was not put: the client was closed"))

    def _end(self, error: BaseException | None) -> None:
        self._uplink.lanes.leave(self.target.lane)
        if error is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def _write(self, ticket: int, segments: list[Any]) -> None:
        rpc, target = self._uplink.rpc, self.target
        try:
            parts = [self._fill(part, segment) for part, segment in zip(self._parts, segments, strict=True)]
            if self.future.cancelled():
                rpc.start_call("abort", (ticket,), {}, idempotent=True)
                return
            args = (target.channel, target.key, target.shape, parts, target.timeout, ticket)
            options, timeout = {"ack": target.ack}, target.timeout + MARGIN
            sent = rpc.start_call("put", args, options, timeout=timeout, convert=self._uplink.spares.keep)
            chain(sent, self.future)
        except Exception as error:  # noqa: BLE001 - the future carries it; the room must not stay taken
            rpc.start_call("abort", (ticket,), {}, idempotent=True)
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)
        finally:
            self._uplink.lanes.leave(target.lane)

    def _fill(self, part: Any, segment: list[Any] | None) -> payload.Part:
        return payload.inline(part) if segment is None else fill(segment, part)


class Lanes:
    """Program order of puts per (channel, key): while a large put is being written, later ones wait behind it."""

    def __init__(self) -> None:
        self._busy: dict[tuple[str, Key], deque[LargePut | tuple[Future[None], Callable[[], Future[None]]]]] = {}
        self._lock = threading.Lock()

    def enter_small(self, target: Target, send: "Callable[[], Future[None]]") -> "Future[None]":
        """Send at once, or when the lane of `target` is free."""
        with self._lock:
            queue = self._busy.get(target.lane)
            if queue is None:
                return send()
            future: Future[None] = Future()
            queue.append((future, send))
        self._bound(future, target)
        return future

    def enter_large(self, put: LargePut) -> None:
        """Start `put` at once, or when the lane is free; it holds the lane until `leave`."""
        with self._lock:
            queue = self._busy.get(put.target.lane)
            if queue is not None:
                queue.append(put)
            else:
                self._busy[put.target.lane] = deque()
        if queue is not None:
            self._bound(put.future, put.target)
        else:
            put.start()

    def _bound(self, future: "Future[None]", target: Target) -> None:
        """End a put that still waits in its lane when its patience does."""
        io = IoThread.shared()
        timer = io.call_at(target.since + target.patience, lambda: self._give_up(future, target))
        future.add_done_callback(lambda done: timer.cancel())

    def _give_up(self, future: "Future[None]", target: Target) -> None:
        with self._lock:
            queue = self._busy.get(target.lane, deque())
            waiting = [entry for entry in queue if _future_of(entry) is future]
            for entry in waiting:
                queue.remove(entry)
        if waiting and future.set_running_or_notify_cancel():
            future.set_exception(target.late())

    def leave(self, lane: tuple[str, Key]) -> None:
        """Let the next puts of the lane go, up to and including the next large one."""
        with self._lock:
            queue = self._busy[lane]
            while queue:
                waiting = queue.popleft()
                if isinstance(waiting, LargePut):
                    break
                future, send = waiting
                if not future.cancelled():
                    _start(send, future)
            else:
                del self._busy[lane]
                return
        waiting.start()


class Spares:
    """Segments the server lent in advance, one with the answer to each large put. Thread-safe."""

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc
        self._free: list[list[Any]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> list[Any] | None:
        """Return [segment, generation, size] with room for `nbytes` and not much more, if there is one."""
        with self._lock:
            for spare in self._free:
                if nbytes <= spare[2] <= 2 * nbytes:
                    self._free.remove(spare)
                    return spare
        return None

    def keep(self, spare: list[Any] | None) -> None:
        """Keep what came with an answer, in place of the oldest if there are too many."""
        if spare is None:
            return
        with self._lock:
            self._free.append(spare)
            surplus = self._free.pop(0) if len(self._free) > MAX_SPARES else None
        if surplus is not None:
            self.give_back(surplus)

    def give_back(self, spare: list[Any]) -> None:
        """Let the server have a segment again."""
        self._rpc.give_back(Placement(spare[0], spare[1]))

    def clear(self) -> None:
        """Forget all: the server knows nothing of them any more."""
        with self._lock:
            self._free.clear()


class Uplink:
    """What the puts of one client share."""

    def __init__(self, rpc: RpcClient) -> None:
        self.rpc = rpc
        self.copier = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="rljob-channel-copy")
        self.lanes = Lanes()
        self.spares = Spares(rpc)

    def put(self, parts: list[Any], target: Target) -> "Future[None]":
        """Return a future that is done when the server has accepted the payload."""
        large = [part for part in parts if payload.worth_a_segment(part)] if self.rpc.shares_memory else []
        spare = self.spares.take(memoryview(large[0]).nbytes) if len(large) == 1 else None
        if spare is not None:
            try:
                filled = [
                    fill(spare, part) if payload.worth_a_segment(part) else payload.inline(part) for part in parts
                ]
            except FrameError:
                pass  # the server deleted it, because it took this process for lost: ask for room as if there was none
            else:
                return self._put_spare(spare, filled, target)
        if large:
            put = LargePut(self, parts, target)
            self.lanes.enter_large(put)
            return put.future
        return self._send([payload.inline(part) for part in parts], target, None)

    def _put_spare(self, spare: list[Any], filled: list[Any], target: Target) -> "Future[None]":
        future = self._send(filled, target, self.spares.keep)

        def done(ended: "Future[None]") -> None:
            if ended.cancelled() or ended.exception() is not None:
                self.spares.give_back(spare)  # without effect if the server took it over after all

        future.add_done_callback(done)
        return future

    def _send(self, parts: list[Any], target: Target, convert: Callable[[Any], Any] | None) -> "Future[None]":
        options = {"nowait": target.nowait, "ack": target.ack}

        def send() -> "Future[None]":
            left = target.left()
            args = (target.channel, target.key, target.shape, parts, left)
            return self.rpc.start_call("put", args, options, timeout=left + MARGIN, convert=convert)

        return self.lanes.enter_small(target, send)


def _future_of(waiting: "LargePut | tuple[Future[None], Callable[[], Future[None]]]") -> "Future[None]":
    return waiting.future if isinstance(waiting, LargePut) else waiting[0]


def fill(segment: list[Any], part: Any) -> payload.Part:
    """Copy `part` into [segment, generation, size] and return how it stands on the wire."""
    view = memoryview(part).cast("B")
    copy_into(SharedMemory.shared().reader.view(segment[0], 0, view.nbytes), view)
    return [segment[0], segment[1], view.nbytes]


def _start(send: "Callable[[], Future[None]]", future: "Future[None]") -> None:
    """Let `future` end as what `send` starts, or with the error of what cannot travel."""
    try:
        chain(send(), future)
    except (TypeError, ValueError) as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


def chain(inner: "Future[Any]", outer: "Future[Any]") -> None:
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
