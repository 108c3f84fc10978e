"""The I/O thread: the one thread of a process that watches its ZeroMQ sockets.

Any thread can schedule work on it with `call_soon` and `call_at`. The callback of a registered socket runs when the socket is readable.
Callbacks must not block: handlers of users run on other threads (`handlers`). The thread waits in one epoll over the sockets' file
descriptors and an eventfd, without polling. Used by rpc, bulk, curve (ZAP) and the channel.
"""

import atexit
import contextlib
import heapq
import ipaddress
import itertools
import logging
import os
import select
import socket as network
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import zmq

from rl_core.api.errors import ConfigError
from rl_core.transports.frames import FRAME_BYTES

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
LINGER_MS = 1_000
RECONNECT_MS = (200, 5_000)
"""First and longest pause between two attempts to connect; each resolves the name again."""
CONNECT_TIMEOUT_MS = 5_000
"""Limit of one attempt to connect. A host that is gone does not answer, and its successor has another address."""
HANDSHAKE_MS = 10_000
"""Limit of a handshake. A connection that has not proved a key by then is closed."""

MAX_FRAME_BYTES = FRAME_BYTES + 1024
"""Largest frame that is received, its encryption included."""
SWITCH_S = 0.0005
"""Seconds after which a thread that computes lets another run, where one wants to: Python's 5 ms would be added to every message."""
LONGEST_SLEEP = 86_400.0
"""Seconds of one sleep at most: poll and epoll refuse more than 24 days."""

# as plain integers: pyzmq's flag enums cost microseconds per operation
_EVENTS, _POLLIN, _MORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.MORE)
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)


class Timer:
    """A scheduled callback, which `cancel` removes."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not run the callback."""
        self.callback = None


class IoThread:
    """Owns the ZeroMQ context and all sockets of the process. Use the instance that `IoThread.shared()` returns."""

    _shared: ClassVar["IoThread | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Guards `_shared`: two threads at first use must not start two I/O threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        sys.setswitchinterval(SWITCH_S)
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 65_535)
        self.clock = clock
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sleeping = False
        """Whether the thread may be waiting in epoll, so that `call_soon` must wake it. Otherwise it will read the queue anyway."""
        self._stopping = False
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._ready: dict[int, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name="rljob-io", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> "IoThread":
        """Return the I/O thread of this process. It is started at first use, and again in a forked child."""
        shared = cls._shared
        if shared is None or shared._pid != os.getpid():
            with cls._lock:
                shared = cls._shared
                if shared is None or shared._pid != os.getpid():
                    shared = cls._shared = cls()
                    atexit.register(shared.stop)
        return shared

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback(*args)` on the thread, in the order of the calls. Takes no lock and is safe in finalizers."""
        self._soon.append((callback, args))
        # `_sleeping` is left to the thread itself: a caller that an interrupt ended between the two would leave it asleep for good
        if self._sleeping:
            os.eventfd_write(self._wake, 1)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run `callback()` at `when` (the thread's clock, seconds) unless the returned timer is cancelled."""
        timer = Timer(callback)
        if self.is_current():
            self._add_timer(when, timer)
        else:
            self.call_soon(self._add_timer, when, timer)
        return timer

    def register(self, socket: zmq.Socket[Any], on_ready: Callable[[], None]) -> None:
        """Call `on_ready()` on this thread when `socket` may be readable. Any thread may call this.

        ZeroMQ signals a change once. `on_ready` must read until `receive` returns None or `has_message` is False. After sending on the
        socket the caller must check `has_message` too, unless `on_ready` has still to read: sending may consume the signal.
        """
        number = descriptor(socket)
        self._ready[number] = on_ready
        self._epoll.register(number, select.EPOLLIN)
        self.call_soon(on_ready)  # a fresh pipe tells nothing until it was found empty once

    def watch(self, number: int, enabled: bool) -> None:
        """Watch the registered socket with this file descriptor, or, with `enabled` False, leave it to another thread.

        Any thread may call this, under a lock that keeps the socket registered.
        """
        self._epoll.modify(number, select.EPOLLIN if enabled else 0)

    def unregister(self, socket: zmq.Socket[Any]) -> None:
        """Stop watching `socket`. Call it on the I/O thread."""
        number = descriptor(socket)
        if self._ready.pop(number, None) is not None:
            self._epoll.unregister(number)

    def run(self, function: Callable[[], Any], timeout: float = 10.0) -> Any:
        """Run `function()` on the thread and return its result or raise its error. `timeout` bounds the wait, in seconds."""
        if self.is_current():
            return function()
        done = threading.Event()
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["value"] = function()
            except BaseException as error:  # noqa: BLE001 - raised again for the caller
                outcome["error"] = error
            done.set()

        self.call_soon(work)
        if not done.wait(timeout):
            raise TimeoutError(f"the I/O thread did not answer for {timeout} s")
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    def stop(self) -> None:
        """Close all sockets within their linger time and end the thread. Call it at the end of the process."""
        if self._pid != os.getpid():
            return
        self._stopping = True
        self.call_soon(lambda: None)
        self._thread.join(2 * LINGER_MS / 1000 + 1)

    def _run(self) -> None:
        while not self._stopping:
            for number, _ in self._epoll.poll(self._pause()):
                self._sleeping = False
                if number == self._wake:
                    self._clear_wake()
                elif (on_ready := self._ready.get(number)) is not None:
                    self._guarded(on_ready)
            self._sleeping = False
            for _ in range(len(self._soon)):
                callback, args = self._soon.popleft()
                self._guarded(callback, *args)
            self._run_timers()
        self.context.destroy(linger=LINGER_MS)

    def _pause(self) -> float:
        self._sleeping = True  # before the look at the queue: whoever appends later sees it and wakes the thread
        if self._soon:
            return 0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        # rounded up, or it would wake too early and turn once more
        return min(max(0.0, self._timers[0][0] - self.clock()) + 0.0005, LONGEST_SLEEP)

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run_timers(self) -> None:
        now = self.clock() if self._timers else 0.0
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                self._guarded(callback)

    def _add_timer(self, when: float, timer: Timer) -> None:
        heapq.heappush(self._timers, (when, next(self._order), timer))

    def _guarded(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except BaseException:  # SystemExit too: without this thread every call of the process would hang
            logger.exception("callback %r failed on the I/O thread", callback)


def has_message(socket: zmq.Socket[Any]) -> bool:
    """Return whether a message waits on `socket`. A call takes about 3 us."""
    events: Any = socket.get(_EVENTS)
    return bool(events & _POLLIN)


def send(socket: zmq.Socket[Any], parts: Sequence[Any]) -> None:
    """Send a message without waiting and without copying its large parts. Raises zmq.ZMQError."""
    for part in parts[:-1]:
        socket.send(part, _NOBLOCK_MORE, copy=False)
    socket.send(parts[-1], _NOBLOCK, copy=False)


def receive(socket: zmq.Socket[Any], *, look: bool = False) -> list[zmq.Frame] | None:
    """Return the frames of the next message on `socket`; None if none waits.

    With `look` it asks for a message first. That costs less where none waits, and more where one does.
    """
    if look and not has_message(socket):
        return None
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    parts = [frame]
    while frame.get(_MORE):
        frame = socket.recv(_NOBLOCK, copy=False)
        parts.append(frame)
    return parts


def descriptor(socket: zmq.Socket[Any]) -> int:
    """Return the file descriptor that becomes readable when the state of `socket` changes."""
    number: Any = socket.getsockopt(zmq.FD)
    return int(number)


def configure(socket: zmq.Socket[Any]) -> None:
    """Set the options that all sockets share: heartbeats, linger, reconnection and the largest frame.

    Queues have no limit of their own; credit bounds them.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # before it knows who sends, ZeroMQ holds a whole frame: a larger one ends the connection
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `tcp://host:port`. Raises ConfigError for anything else."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    number = 0 if port == "*" else int(port) if port.isascii() and port.isdigit() else -1
    if not address.startswith("tcp://") or not colon or not host or not 0 <= number <= 65_535:
        raise ConfigError(f"address must be tcp://host:port with a port of at most 65535, got {address!r}")
    return host.strip("[]"), number


def is_loopback(host: str) -> bool:
    """Return whether `host` can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(address: str, *, has_keys: bool, verb: str) -> None:
    """Raise ConfigError when `address` is not on the loopback interface and there are no keys."""
    host, _ = split_address(address)
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"without CURVE keys only loopback addresses may be used, got {verb} {address}; set RLJOB_CURVE_DIR"
        )


def bind(socket: zmq.Socket[Any], address: str) -> str:
    """Bind `tcp://host:port`, where port 0 means any free port, and return the address to connect to.

    Raises ConfigError naming the address when it is in use or not of this machine.
    """
    host, port = split_address(address)
    numeric = network.gethostbyname(host) if host == "localhost" else host
    try:
        socket.bind(f"tcp://{numeric}:{port or '*'}")
    except zmq.ZMQError as error:
        way_out = (
            "stop the process that listens there or choose another port"
            if error.errno == zmq.EADDRINUSE
            else "use an address of this machine"
        )
        raise ConfigError(f"cannot bind {address}: {error.strerror}; {way_out}") from error
    endpoint: Any = socket.getsockopt(zmq.LAST_ENDPOINT)
    bound = split_address(endpoint.rstrip(b"\0").decode())[1]
    return f"tcp://{_own_host() if host in ('0.0.0.0', '*', '::') else host}:{bound}"


def _own_host() -> str:
    try:
        return network.gethostbyname(network.gethostname())
    except OSError:
        return "127.0.0.1"
