"""One call of an RPC client: the request in flight, its answer, and the future that can drive its connection."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_core.transports import frames
from rl_core.transports.frames import FrameHeader
from rl_core.transports.links import Link

if TYPE_CHECKING:
    from rl_core.transports.rpc_connection import Connection


class Answer:
    """What ended a call, or one item of a stream: an encoded reply still to be decoded, or an error."""

    __slots__ = ("_error", "_header", "_link", "_parts")

    def __init__(
        self,
        *,
        error: BaseException | None = None,
        header: FrameHeader | None = None,
        parts: list[Any] | None = None,
        link: Link | None = None,
    ) -> None:
        self._error, self._header, self._parts, self._link = error, header, parts, link

    def load(self) -> Any:
        """Decode and return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        if self._header is None or self._link is None:
            raise AssertionError("bug: an answer is an error or a message")
        return frames.read_body(self._header, self._parts or [], resolve=self._link.resolve)

    def discard(self) -> None:
        """Give back the memory of a reply that nobody wants."""
        if self._header is not None and self._link is not None:
            self._link.discard(self._header)


Sink = Callable[[str, Answer], None]


class Call:
    """One request. Its connection's lock guards it. `sink(kind, answer)` is called once; for a stream once per item too.

    `inplace`: the sink takes no locks and may run wherever the answer is read.
    """

    __slots__ = (
        "abandoned",
        "deadline",
        "driver",
        "ended",
        "id",
        "idempotent",
        "inplace",
        "method",
        "nbytes",
        "outcome",
        "parts",
        "received",
        "sent",
        "sink",
        "timeout",
        "waits",
        "woken",
    )

    def __init__(
        self,
        number: int,
        method: str,
        parts: list[Any],
        sink: Sink,
        *,
        timeout: float,
        deadline: float,
        idempotent: bool,
        inplace: bool,
        waits: bool,
    ) -> None:
        self.id, self.method, self.parts, self.sink = number, method, parts, sink
        self.timeout, self.deadline, self.idempotent, self.inplace = timeout, deadline, idempotent, inplace
        self.waits = waits
        """It waits at the server for what others do there, and takes no credit from them."""
        self.nbytes: int = 0 if waits else len(parts[0]) + sum(part.nbytes for part in parts[1:])
        """Credit it takes, bytes."""
        self.sent = self.received = self.abandoned = self.ended = False
        self.driver: int | None = None
        """Thread that waits for this call and settles it itself."""
        self.outcome: tuple[str, Answer] | None = None
        """What a driver has to settle."""
        self.woken: threading.Lock | None = None
        """What a driver that does not lead waits on."""

    def settle(self) -> None:
        """Give the driver's outcome, if there is one, to the sink."""
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            self.end(*outcome)

    def end(self, kind: str, answer: Answer) -> None:
        """Tell the sink how the call ended, and let go of all it held: callers may keep the future for long."""
        sink, self.sink, self.parts = self.sink, _unheard, []
        sink(kind, answer)


def _unheard(kind: str, answer: Answer) -> None:
    answer.discard()


class CallFuture(concurrent.futures.Future[Any]):
    """The future of a call. `result()` reads the connection itself; `cancel()` cancels the call."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__()
        self._connection = connection
        self._call: Call | None = None

    def bind(self, call: Call) -> None:
        """Name the call, once it exists."""
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        """Return the value or raise the error; TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._call is not None and not self.done():
            self._connection.drive(self._call, timeout)
        return super().result(None if until is None else max(0.0, until - time.monotonic()))

    def cancel(self) -> bool:
        """Cancel the call unless it has ended."""
        cancelled = super().cancel()
        if cancelled and self._call is not None:
            self._connection.abandon(self._call)
        return cancelled
