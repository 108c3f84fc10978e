"""A channel inside one process: items are passed by reference, with the same rules and without sockets.

`LocalBackend` drives one `ChannelCore` under a lock. A timer of the I/O thread handles deadlines.
"""

import concurrent.futures
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from rl_core.api.errors import ChannelClosed
from rl_core.channel.backend import PutRequest, TakeRequest
from rl_core.channel.core import ChannelCore
from rl_core.channel.model import Delivery, Put, Take
from rl_core.messages.channel import ChannelOptions
from rl_core.transports.shared_memory import LentMemory
from rl_core.transports.sockets import IoThread, Timer

Future = concurrent.futures.Future
Operation = TypeVar("Operation", Put, Take)

_channels: "weakref.WeakValueDictionary[str, LocalBackend]" = weakref.WeakValueDictionary()
"""The channels of this process by name. One lives as long as a handle of it or an operation on it does."""
_naming = threading.Lock()
"""Guards `_channels`: of two threads that create a name, one creates it and the other connects."""


def create(name: str, options: ChannelOptions) -> "LocalBackend":
    """Return the channel `name` of this process, new or existing. Raises ConfigError when it exists with other options."""
    if name in _channels:
        gc.collect()  # a channel that only a cycle holds, as a caught exception and its frame make one, has ended
    with _naming:
        channel = _channels.get(name)
        if channel is None:
            channel = _channels[name] = LocalBackend(name, options)
    options.check_equal(name, channel.options)
    return channel


def find(name: str) -> "LocalBackend | None":
    """Return the channel `name` of this process, None if there is none."""
    with _naming:
        return _channels.get(name)


class _Process:
    """The one client of a local channel."""

    name = "this process"


class LocalBackend:
    """Implements `backend.Backend` in memory."""

    def __init__(self, name: str, options: ChannelOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._core = ChannelCore(name, options)
        self._lock = threading.RLock()
        """Guards the core and the timer. Re-entrant, because setting a result runs the callbacks of its future."""
        self._clock = clock
        self._client = _Process()
        self._registrations: list[int] = []
        """Numbers of the producers that are not done."""
        self._numbers = itertools.count()
        self._timer: Timer | None = None
        self._timer_deadline = float("inf")

    def put(self, request: PutRequest) -> "Future[None]":
        """Return a future that is done when the item is accepted."""
        future: Future[None] = Future()
        now = self._clock()

        def store(put: Put) -> None:
            if not _claim(future):
                self._core.cancel_put(self._clock(), put)
                return
            try:
                self._core.store(self._clock(), put, request.item, request.weight)
            except ChannelClosed as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        nbytes = _nbytes(request.item) if self.options.max_bytes is not None else 0
        put = Put(
            self._client, request.key, nbytes, store, lambda error: _fail(future, error), now + request.timeout, now
        )
        with self._lock:
            self._core.put(now, put, nowait=request.nowait)
            self._arm()
        self._on_cancel(future, put, self._core.cancel_put)
        return future

    def allocate(self, nbytes: int) -> "Future[LentMemory | None]":
        """Return a completed future whose result is None: items are passed by reference, so they need no shared memory."""
        future: Future[LentMemory | None] = Future()
        future.set_result(None)
        return future

    def take(self, request: TakeRequest) -> "Future[list[Delivery]]":
        """Request items. Returns a future of the received items."""
        future: Future[list[Delivery]] = Future()
        now = self._clock()

        def hand_over(take: Take, deliveries: list[Delivery]) -> None:
            if _claim(future):
                future.set_result(deliveries)
            else:
                self._core.cancel_take(self._clock(), take)

        take = Take(
            self._client, request.key, hand_over, lambda error: _fail(future, error), now + request.timeout, now,
            target=request.target, most=request.most, allow_oversize=request.allow_oversize,
        )  # fmt: skip
        with self._lock:
            self._core.take(now, take, nowait=request.nowait)
            self._arm()
        self._on_cancel(future, take, self._core.cancel_take)
        return future

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that reports nothing, because no other process uses the channel."""
        return nullcontext()

    def load(self, delivery: Delivery) -> Any:
        """Return the item itself: it never left the process."""
        return delivery.payload

    def confirm(self, tokens: list[str]) -> None:
        """Delete the received items with these tokens."""
        with self._lock:
            self._core.confirm(self._clock(), tokens)

    def requeue(self, deliveries: list[Delivery], *, loaded: bool = False) -> None:
        """Return items that no user received."""
        with self._lock:
            self._core.requeue(self._clock(), [delivery.token for delivery in deliveries])

    def control(self, verb: str, *args: Any) -> "Future[Any]":
        """Return a finished future of one of the verbs of `backend.Backend`."""
        future: Future[Any] = Future()
        try:
            with self._lock:
                future.set_result(self._verb(verb, self._clock(), *args))
                self._arm()
        except (ValueError, ChannelClosed) as error:
            future.set_exception(error)
        return future

    def _verb(self, verb: str, now: float, *args: Any) -> Any:
        core = self._core
        core.tick(now)
        if verb == "depth":
            return core.depth(args[0])
        if verb == "full":
            return core.is_full(args[0])
        if verb == "stats":
            return core.stats(now)
        if verb == "move":
            return core.move(now, *args)
        if verb == "register":
            number = next(self._numbers)
            core.register_producer(self._client, number)
            return self._registrations.append(number)
        if verb == "done":
            return core.done_producing(now, self._client, self._registrations.pop()) if self._registrations else None
        if verb == "close":
            return core.close(now, *args)
        raise ValueError(f"bug: channels have no verb {verb!r}")

    def _on_cancel(self, future: "Future[Any]", operation: Operation, undo: Callable[[float, Operation], None]) -> None:
        """Undo `operation` when `future` is cancelled, which it can be only while the core has the operation waiting."""
        waiting = weakref.ref(operation)

        def done(finished: "Future[Any]") -> None:
            if finished.cancelled() and (target := waiting()) is not None:
                with self._lock:
                    undo(self._clock(), target)

        future.add_done_callback(done)

    def _arm(self) -> None:
        deadline = self._core.next_due()
        if deadline < self._timer_deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_deadline = deadline
            io = IoThread.shared()
            channel = weakref.ref(self)  # a deadline that was met keeps no channel alive until it would have passed

            def tick() -> None:
                if (backend := channel()) is not None:
                    backend._tick()

            self._timer = io.call_at(io.clock() + deadline - self._clock(), tick)

    def _tick(self) -> None:
        with self._lock:
            self._timer, self._timer_deadline = None, float("inf")
            self._core.tick(self._clock())
            self._arm()


def _nbytes(item: Any) -> int:
    """Return the number of bytes of the arrays, tensors and text in `item`, which `max_bytes` limits in a local channel."""
    if isinstance(item, str | bytes | bytearray):
        return len(item)
    if isinstance(item, Mapping):
        return sum(_nbytes(part) for pair in item.items() for part in pair)
    if isinstance(item, list | tuple | set | frozenset):
        return sum(map(_nbytes, item))
    if is_dataclass(item) and not isinstance(item, type):
        return sum(_nbytes(getattr(item, field.name)) for field in fields(item))
    return int(getattr(item, "nbytes", 0))


def _claim(future: "Future[Any]") -> bool:
    return future.set_running_or_notify_cancel()


def _fail(future: "Future[Any]", error: Exception) -> None:
    if _claim(future):
        future.set_exception(error)
