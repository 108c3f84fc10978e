"""The calls of a connection that have not ended. Some wait in a queue; the others are in flight: they were sent, and not answered yet.

Credit bounds the calls and bytes in flight, to MAX_CALLS and MAX_BYTES of `rpc_wire`. Long polls do not count.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from rl_core.transports import rpc_wire
from rl_core.transports.rpc_call import CallFuture


class PendingCalls:
    """The queue, the calls in flight and the credit of one connection. The lock of the connection must be held to use it."""

    def __init__(self) -> None:
        self.in_flight: dict[int, CallFuture] = {}
        """Number of a call -> the call. A call is removed when it has ended or is to be sent again."""
        self.queue: deque[CallFuture] = deque()
        """Calls that wait for the connection or for credit."""
        self.credit_calls = 0
        """Number of calls in flight, without long polls."""
        self._credit_bytes = 0

    def __iter__(self) -> Iterator[CallFuture]:
        """Iterate over all calls: those in flight, then those in the queue."""
        return iter([*self.in_flight.values(), *self.queue])

    def begin(self) -> list[CallFuture]:
        """Move as many calls as the credit allows from the head of the queue to those in flight, and return them. The caller sends them."""
        started = []
        while self.queue and self._has_credit(self.queue[0]):
            call = self.queue.popleft()
            self.in_flight[call.id] = call
            self.credit_calls += not call.waits
            self._credit_bytes += call.nbytes
            call.sent = True
            started.append(call)
        return started

    def end(self, call: CallFuture) -> None:
        """Remove a call from those in flight, and free its credit. Does nothing if it is not in flight."""
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
        """Remove all calls, queued and in flight, and return them. All credit is free afterwards."""
        calls = list(self)
        self.in_flight.clear()
        self.queue.clear()
        self.credit_calls = self._credit_bytes = 0
        return calls

    def _has_credit(self, call: CallFuture) -> bool:
        if call.waits or self._credit_bytes == 0:  # nothing that takes credit is in flight
            return True
        return self.credit_calls < rpc_wire.MAX_CALLS and self._credit_bytes + call.nbytes <= rpc_wire.MAX_BYTES
