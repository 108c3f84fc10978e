"""Direct connections between two processes of one host, for messages of arrays that follow each other closely.

A message goes from one thread to the other by one Unix socket, without a server and without a thread between them. The socket lies in
/dev/shm, so that exactly the processes that share memory reach it. The process that listens gives out the address, which has a secret, over
a connection that is authenticated already. Both ends are used by one thread each.
"""

import contextlib
import itertools
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from pathlib import Path

import numpy as np

from rl_core.api.errors import FrameError, InfrastructureError
from rl_core.transports import tokens
from rl_core.transports.arrays import HEAD, MAX_BYTES, ArrayCodec, Named
from rl_core.transports.links import ProcessSharedMemory

SECRET_BYTES = 32
SEND_SECONDS = 60
"""How long `Connection.send` waits for a peer that does not read."""
SLICE = 0.05
"""Seconds between two checks of a wait whether it was cancelled or is over."""
BUFFER_BYTES, READ_BYTES = 2**20, 2**16
CROWDED_SECONDS, YIELDED_SECONDS = 0.05, 0.001
"""For CROWDED_SECONDS waits sleep instead of polling, after a polling wait was interrupted by another process for over YIELDED_SECONDS."""
BUSY_SECONDS = 0.001
"""Longest time for which a wait keeps its core busy. To wake a thread that sleeps takes about 0.05 ms, mostly at the cost of the sender."""
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_numbers = itertools.count()
Message = dict[str, np.ndarray]


def cores() -> float:
    """Return how many cores of the processor this container may use at once."""
    usable_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CGROUP_CPU.read_text().split()
        return min(usable_cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup of version 2, or one without a limit
        return usable_cores


class Connection:
    """A connected Unix stream socket to another process of the same host, over which messages of NumPy arrays are sent."""

    def __init__(self, end: socket.socket, *, takes_descriptors: bool = False) -> None:
        """Take over a connected socket. `takes_descriptors`: file descriptors may come with messages."""
        self.socket = end
        self._takes_descriptors = takes_descriptors
        self.descriptors: deque[int] = deque()
        """File descriptors that have come with messages, in the order in which they came. Whoever removes one must close it."""
        self._codec = ArrayCodec()
        self._head_bytes = b""
        """The part of a message's head that has arrived."""
        self._body: bytearray | None = None
        """A message whose end has not arrived; `_filled` bytes of it have, and `_key_and_layout_bytes` are the sizes of its key and layout."""
        self._filled, self._key_and_layout_bytes = 0, (0, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    @classmethod
    def connect(cls, address: str) -> "Connection":
        """Connect to a `Listener`. Raises InfrastructureError when it is gone."""
        name, _, secret = address.partition(" ")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(str(tokens.DIRECTORY / name))
            end.sendall(bytes.fromhex(secret))
        except OSError as error:
            end.close()
            raise InfrastructureError(f"the process that listened at {name} cannot be reached: {error}") from error
        return cls(end)

    def send(self, key: str, arrays: Named, descriptor: int | None = None) -> None:
        """Send a message, with a file descriptor where one is given. Raises InfrastructureError when the other end is gone or does not read."""
        packed, sent = self._codec.pack(key, arrays), 0
        try:
            if descriptor is not None:
                sent = socket.send_fds(self.socket, [packed], [descriptor])
            self.socket.sendall(packed[sent:])
        except OSError as error:
            raise InfrastructureError(f"a direct connection failed: {error}") from error

    def pack(self, key: str, arrays: Named) -> bytes:
        """Return the bytes of a message."""
        return self._codec.pack(key, arrays)

    def receive(self, *, wait: bool = False) -> list[tuple[str, Message]]:
        """Return the messages that have arrived; none where none has. `wait`: wait for some.

        Raises EOFError at the end, FrameError for a malformed message.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            if self._body is not None:
                return self._continue_message(self.socket.recv_into(memoryview(self._body)[self._filled :], 0, flags))
            data = self._read(flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other end closed the connection")
        if self._head_bytes:
            data = self._head_bytes + data
        messages, offset = [], 0
        while len(data) - offset >= HEAD.size:
            size, key_bytes, layout_bytes = HEAD.unpack_from(data, offset)
            if size > MAX_BYTES or key_bytes + layout_bytes > size:
                raise FrameError(f"a message of arrays must have at most {MAX_BYTES} bytes, got {size}")
            offset += HEAD.size
            body = bytearray(data[offset : offset + size])
            offset += (arrived := len(body))
            if arrived < size:
                body = bytearray(size)
                body[:arrived] = data[offset - arrived :]
                self._body, self._filled, self._key_and_layout_bytes = body, arrived, (key_bytes, layout_bytes)
                break
            messages.append(self._codec.unpack(body, key_bytes, layout_bytes))
        self._head_bytes = data[offset:]
        return messages

    def _read(self, flags: int) -> bytes:
        if not self._takes_descriptors:
            return self.socket.recv(READ_BYTES, flags)
        data, descriptors, _, _ = socket.recv_fds(self.socket, READ_BYTES, 1, flags)
        self.descriptors.extend(descriptors)
        return data

    def _continue_message(self, count: int) -> list[tuple[str, Message]]:
        """Return the message of which `count` more bytes have arrived, once it is complete. The memory is that of the arrays."""
        if not count:
            raise EOFError("the other end closed the connection in the middle of a message")
        self._filled += count
        if self._body is None or self._filled < len(self._body):
            return []
        body, self._body = self._body, None
        return [self._codec.unpack(body, *self._key_and_layout_bytes)]

    @property
    def closed(self) -> bool:
        """Whether this end was closed, as it is once the other one has gone."""
        return self.socket.fileno() == -1

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


class Listener:
    """Accepts direct connections of processes that know the address."""

    def __init__(self, uid: str = "") -> None:
        """Listen under a new name, of which the job's `uid` is a part."""
        ProcessSharedMemory.shared(uid)  # its token tells others that this process lives
        name = f"{tokens.owner_name(uid, os.getpid())}-s{next(_numbers)}"
        self._path, self._secret = tokens.DIRECTORY / name, secrets.token_bytes(SECRET_BYTES)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._unlink = weakref.finalize(self, self._path.unlink, missing_ok=True)
        """Removes the socket file; also called at the end of the process."""
        self.socket.listen()
        self.socket.setblocking(False)
        self.address = f"{name} {self._secret.hex()}"
        """Name and secret of the socket. Give it only to processes that may connect."""

    def accept(self) -> Connection | None:
        """Return the next connection; None if no process is connecting, or if it fails the authentication."""
        try:
            end, _ = self.socket.accept()
        except BlockingIOError:
            return None
        end.settimeout(1.0)
        with contextlib.suppress(OSError):
            if secrets.compare_digest(end.recv(SECRET_BYTES, socket.MSG_WAITALL), self._secret):
                end.settimeout(None)
                return Connection(end)
        end.close()
        return None

    def close(self) -> None:
        """Accept no more."""
        self.socket.close()
        self._unlink()


class Mailbox:
    """The messages of several direct connections, by key."""

    def __init__(self, listener: Listener | None = None, *, seconds: float = SEND_SECONDS) -> None:
        """`listener`: its connections are accepted too; None for a process that only connects. `seconds`: how long a peer may not read."""
        self._listener, self._seconds = listener, seconds
        self._poll = select.poll()
        self._has_cores = cores() > 1
        self._busy = False
        """Whether the next wait polls before it sleeps. It does when the last wait was short."""
        self._crowded_until = 0.0
        """Monotonic time until which all waits sleep."""
        self._connections: dict[int, Connection] = {}
        self._arrived: defaultdict[str, deque[tuple[Message, Connection]]] = defaultdict(deque)
        if listener is not None:
            self._poll.register(listener.socket, select.POLLIN)

    def add(self, connection: Connection) -> None:
        """Receive the messages of a connection too."""
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, select.POLLIN)

    def send(self, connection: Connection, key: str, arrays: Named) -> None:
        """Send a message, and receive meanwhile what arrives: two ends that send each other much do not wait for each other.

        Raises InfrastructureError when the other end is gone or does not read; the connection is closed then.
        """
        unsent, deadline = memoryview(connection.pack(key, arrays)), time.monotonic() + self._seconds
        while unsent:
            try:
                unsent = unsent[connection.socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poll.modify(connection.socket, select.POLLIN | select.POLLOUT)
                self.wait(SLICE)
                if connection.closed:
                    raise InfrastructureError("a direct connection was closed by its other end") from None
                self._poll.modify(connection.socket, select.POLLIN)
                if time.monotonic() > deadline:
                    self.remove(connection)
                    raise InfrastructureError(
                        f"a direct connection must be read within {self._seconds:g} s, got none"
                    ) from None
            except OSError as error:
                self.remove(connection)
                raise InfrastructureError(f"a direct connection failed: {error}") from error

    def keep(self, prefix: str) -> None:
        """Delete the received messages whose key does not begin with `prefix`."""
        for key in [key for key in self._arrived if not key.startswith(prefix)]:
            del self._arrived[key]

    def take(self, key: str) -> tuple[Message, Connection] | None:
        """Return the oldest message of `key` and where it came from; None where there is none."""
        messages = self._arrived.get(key)
        return messages.popleft() if messages else None

    def wait(self, seconds: float) -> bool:
        """Wait until something happens, at most `seconds`; return whether it did."""
        events = self._events(seconds)
        for number, _ in events:
            connection = self._connections.get(number)
            if connection is None:
                self._accept()
                continue
            try:
                for key, message in connection.receive():
                    self._arrived[key].append((message, connection))
            except (EOFError, FrameError):
                self.remove(connection)
        return bool(events)

    def _events(self, seconds: float) -> list[tuple[int, int]]:
        """Wait at most `seconds` for events; return pairs of file descriptor and event mask, none if nothing happened.

        If the last wait was short, the thread polls for at most BUSY_SECONDS and lets other threads run in between, before it sleeps.
        """
        started = now = time.monotonic()
        busy = min(seconds, BUSY_SECONDS) if self._busy and started > self._crowded_until else 0.0
        while not (events := self._poll.poll(0)) and now - started < busy:
            os.sched_yield()
            previous, now = now, time.monotonic()
            if now - previous > YIELDED_SECONDS:
                self._crowded_until = now + CROWDED_SECONDS
                break
        if events or not seconds:
            return events
        events = self._poll.poll(1000 * max(seconds - (now - started), 0.0))
        self._busy = self._has_cores and bool(events) and time.monotonic() - started < BUSY_SECONDS
        return events

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections.values()):
            self.remove(connection)
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        if self._listener is not None and (connection := self._listener.accept()) is not None:
            self.add(connection)

    def remove(self, connection: Connection) -> None:
        """Close a connection; may be called again."""
        if connection.closed:
            return
        self._poll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        connection.close()
