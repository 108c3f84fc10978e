"""Limits the connections to a CURVE server that have not authenticated. Each could hold a frame and a file descriptor of this process.

ZeroMQ reports accepted connections, but not which of them authenticated. TCP shows it: after the last message of the handshake the peer has
acknowledged more bytes than a peer without a key is ever sent. Only connections that have not authenticated are closed, and one that has is
not checked again. There is no cost per message. Runs on the I/O thread.
"""

import contextlib
import itertools
import logging
import os
import socket as network
import struct
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rl_core.transports.sockets import IoThread, receive

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
"""Largest number of connections of one server that have not finished the handshake."""
PATIENCE_SECONDS = 1.0
"""Age, in seconds, below which a connection is not closed in favor of a newer one, so that many members can connect at the same time."""
WARN_SECONDS = 60.0
_UNAUTHENTICATED_BYTES = 260
"""Largest number of bytes sent before authentication: a greeting (64), a WELCOME (170) and a refusal (up to 15). READY needs a key."""
_ACKNOWLEDGED = struct.Struct("=Q")
_ACKNOWLEDGED_AT = 120
"""Offset of tcpi_bytes_acked in struct tcp_info."""
_numbers = itertools.count()


class UnauthenticatedConnections:
    """The connections of one listening socket that have not authenticated."""

    def __init__(self, io: IoThread, server: zmq.Socket[Any], *, what: str) -> None:
        """Watch `server`, which must not be bound yet, until it is closed. `what` is its name in the log."""
        self._io, self._what = io, what
        self._pending: dict[int, tuple[Any, float]] = {}
        """File descriptor -> (peer, time of its arrival), oldest first."""
        self._warned = -WARN_SECONDS
        address = f"inproc://strangers-{next(_numbers)}"
        server.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        self._events = io.context.socket(zmq.PAIR)
        self._events.linger = 0
        self._events.connect(address)
        io.register(self._events, self._take_events)

    def _take_events(self) -> None:
        while not self._events.closed and (parts := receive(self._events)) is not None:
            event = parse_monitor_message([frame.bytes for frame in parts])
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                self._io.unregister(self._events)
                self._events.close()
            else:
                self._accepted(event["value"])

    def _accepted(self, number: int) -> None:
        with _borrowed(number) as connection:
            self._pending.pop(number, None)
            if connection is not None:
                self._pending[number] = (connection.getpeername(), self._io.clock())
        if len(self._pending) > MAX_UNAUTHENTICATED:
            self._pending = {fd: entry for fd, entry in self._pending.items() if _is_unauthenticated(fd, entry[0])}
        if len(self._pending) > MAX_UNAUTHENTICATED:
            self._close_one()

    def _close_one(self) -> None:
        now = self._io.clock()
        oldest, newest = next(iter(self._pending)), next(reversed(self._pending))
        evicted = oldest if now - self._pending[oldest][1] > PATIENCE_SECONDS else newest
        del self._pending[evicted]
        with _borrowed(evicted) as connection:
            if connection is not None:
                connection.shutdown(network.SHUT_RDWR)  # ZeroMQ sees the end and closes it
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            logger.warning(
                "service %s: more than %s connections without a key, ending some", self._what, MAX_UNAUTHENTICATED
            )


@contextlib.contextmanager
def _borrowed(number: int) -> Any:
    """Yield the connection of a file descriptor that ZeroMQ owns, or None if it is closed. Errors because it is closed meanwhile are ignored."""
    try:
        connection = network.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with connection, contextlib.suppress(OSError):
        yield connection


def _is_unauthenticated(number: int, peer: Any) -> bool:
    """Return whether the connection with `peer` is there and has not finished its handshake."""
    unauthenticated = False
    with _borrowed(number) as connection:
        if connection is not None and connection.getpeername() == peer:
            info = connection.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, 256)
            has_field = len(info) >= _ACKNOWLEDGED_AT + _ACKNOWLEDGED.size  # an old kernel does not report it
            unauthenticated = (
                has_field and _ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)[0] <= _UNAUTHENTICATED_BYTES
            )
    return unauthenticated
