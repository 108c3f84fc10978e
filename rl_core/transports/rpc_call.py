"""One request of an RPC client and the future of its reply."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


class CallFuture(concurrent.futures.Future[Any]):
    """A request and the future of its reply. Only its connection may use the fields below, under the lock of the connection.

    `result()` may be called on any thread but the I/O thread, on which callbacks run. `cancel()` also cancels the handler on the server.
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
    ) -> None:
        super().__init__()
        self.id, self.method, self.parts = number, method, parts
        self.timeout, self.deadline = timeout, deadline
        """Seconds, and when they end on the clock of the I/O thread."""
        self.idempotent = idempotent
        self.waits = waits
        """Whether it is a long poll: it waits at the server for other requests, so it does not count against flow control."""
        self.nbytes: int = 0 if waits else sum([memoryview(part).nbytes for part in parts])
        """Bytes that count against flow control."""
        self.sent = self.received = False
        """Whether it left this process, and whether the server confirmed it."""
        self._ended = False
        self._convert, self._on_cancel = convert, on_cancel

    def settle(self, load: Callable[[], Any]) -> None:
        """Complete the future with what `load` returns or raises, unless it was cancelled. Callbacks run before this returns."""
        if not self._ends():
            return
        try:
            value = load()
            value = value if self._convert is None else self._convert(value)
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever asks
            self.set_exception(error)
        else:
            self.set_result(value)

    def fail(self, error: Exception) -> None:
        """Complete the future with `error`, unless it was cancelled."""
        if self._ends():
            self.set_exception(error)

    def _ends(self) -> bool:
        """Return whether a caller waits for the outcome. True once only: a callback of another call may close the client."""
        if self._ended:
            return False
        self._ended = True
        self.parts = []  # callers may keep the future for long
        return self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the call unless it has ended; return whether it was cancelled."""
        cancelled = super().cancel()
        if cancelled:
            self._on_cancel(self)
        return cancelled
