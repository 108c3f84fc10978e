"""One request of an RPC client and the future of its reply."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, Protocol

from rl_core.api.errors import InfrastructureError
from rl_core.transports.interrupts import Interrupts


class ClientClosed(InfrastructureError):
    """This process closed its client before the reply came."""


class Reader(Protocol):
    """Receives replies on a thread that waits for them. Implemented by `rpc_connection.Connection`."""

    def read_until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Receive until `done()`, at most for `seconds`; return False at once when this thread is not to receive."""

    def wake_reader(self) -> None:
        """Let the thread in `read_until` look at `done()` again."""


class CallFuture(concurrent.futures.Future[Any]):
    """A request and the future of its reply. Only its connection may use the fields below, under the lock of the connection.

    `result()` may be called on any thread but the I/O thread. It may read the connection on the thread that waits.
    Callbacks run on the thread that reads, which is the I/O thread otherwise. `cancel()` also cancels the handler on the server.
    """

    def __init__(
        self,
        number: int,
        method: str,
        parts: list[Any],
        *,
        timeout: float,
        deadline: float,
        idempotent: bool,
        waits: bool,
        convert: Callable[[Any], Any] | None,
        on_cancel: "Callable[[CallFuture], None]",
        reader: Reader,
    ) -> None:
        super().__init__()
        self.id, self.method, self.parts = number, method, parts
        self.timeout, self.deadline = timeout, deadline
        """Seconds, and when they end on the clock of the I/O thread."""
        self.idempotent = idempotent
        self.waits = waits
        """Whether it is a long poll: it waits at the server for other requests, so it does not count against flow control."""
        self.nbytes: int = 0 if waits else len(parts[0]) + sum([memoryview(part).nbytes for part in parts[1:]])
        """Bytes that count against flow control."""
        self.sent = self.received = False
        """Whether it left this process, and whether the server confirmed it."""
        self._ended = False
        self._convert, self._on_cancel = convert, on_cancel
        self._reader = reader
        self._reads = False
        """Whether a thread that reads the connection waits for this call."""

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the call, or raise its error. Raises TimeoutError after `timeout` seconds; None waits without a limit."""
        return super().result(0 if self.read_until_done(timeout) and timeout is not None else timeout)

    def read_until_done(self, seconds: float | None) -> bool:
        """Read the connection on this thread until the call has ended or `seconds` have passed (None: no limit).

        Returns False at once when another thread does so or several calls are in flight.
        """
        if self.done():
            return True
        self._reads = True  # before the reader looks: whoever ends the call later wakes it
        return self._reader.read_until(self.done, seconds)

    def settle(self, load: Callable[[], Any]) -> None:
        """Complete the future with what `load` returns or raises, unless it was cancelled. Callbacks run before this returns."""
        if not self._ends():
            return
        try:
            value = load()
            value = value if self._convert is None else self._convert(value)
        except BaseException as error:
            self.set_exception(error)  # the future carries it to whoever asks
            self._wake()
            if not isinstance(error, Exception):  # of a signal's handler, on the thread that reads
                raise
        else:
            self.set_result(value)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Complete the future with `error`, unless it was cancelled."""
        if self._ends():
            self.set_exception(error)
            self._wake()

    def _wake(self) -> None:
        if self._reads:
            self._reader.wake_reader()

    def _ends(self) -> bool:
        """Return whether a caller waits for the outcome. True once only: a callback of another call may close the client."""
        if self._ended:
            return False
        self._ended = True
        self.parts = []  # callers may keep the future for long
        return self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the call unless it has ended; return whether it was cancelled."""
        with Interrupts.deferred():
            cancelled = super().cancel()
            if cancelled:
                self._wake()
                self._on_cancel(self)
        return cancelled
