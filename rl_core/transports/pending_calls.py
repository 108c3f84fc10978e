"""The calls of a connection that have not ended: those that wait in a queue, and those in flight, which take credit."""

from collections import deque
from collections.abc import Iterable, Iterator

from rl_core.transports import rpc_wire
from rl_core.transports.rpc_call import CallFuture


class PendingCalls:
    """Queue and credit of one connection. Its methods are called under the lock of the connection."""

    def __init__(self) -> None:
        self.in_flight: dict[int, CallFuture] = {}
        """By number of the call. A call leaves it when it has ended or is to be sent again."""
        self.queue: deque[CallFuture] = deque()
        """Calls that wait for the connection or for credit."""
        self.credit_calls = 0
        """Calls in flight that take credit: all but long polls."""
        self._credit_bytes = 0

    def __iter__(self) -> Iterator[CallFuture]:
        """Iterate over all calls: those in flight, then those in the queue."""
        return iter([*self.in_flight.values(), *self.queue])

    def begin(self) -> list[CallFuture]:
        """Move the first calls of the queue into flight, as many as the credit allows, and return them."""
        begun = []
        while self.queue and self._has_credit(self.queue[0]):
            call = self.queue.popleft()
            self.in_flight[call.id] = call
            self.credit_calls += not call.waits
            self._credit_bytes += call.nbytes
            call.sent = True
            begun.append(call)
        return begun

    def end(self, call: CallFuture) -> None:
        """Remove a call from those in flight; it takes no credit any more. Does nothing if it is not in flight."""
        if self.in_flight.pop(call.id, None) is not None:
            self.credit_calls -= not call.waits
            self._credit_bytes -= call.nbytes

    def return_to_queue(self, calls: Iterable[CallFuture]) -> None:
        """Put calls that were in flight back at the head of the queue, in their order."""
        for call in reversed(list(calls)):
            self.end(call)
            call.sent = call.received = False
            self.queue.appendleft(call)

    def clear(self) -> list[CallFuture]:
        """Remove and return all calls."""
        calls = list(self)
        self.in_flight.clear()
        self.queue.clear()
        self.credit_calls = self._credit_bytes = 0
        return calls

    def _has_credit(self, call: CallFuture) -> bool:
        if call.waits or self._credit_bytes == 0:  # nothing that takes credit is in flight
            return True
        return self.credit_calls < rpc_wire.MAX_CALLS and self._credit_bytes + call.nbytes <= rpc_wire.MAX_BYTES
