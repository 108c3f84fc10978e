"""The client of RPC, for any thread and any event loop. See `rpc_connection` for the connection and `rpc` for the protocol."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.transports import frames, rpc_wire, sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.loop_futures import wait_future
from rl_core.transports.rpc_call import CallFuture
from rl_core.transports.rpc_connection import Connection
from rl_core.transports.shared_memory import LentMemory, SegmentLoan
from rl_core.transports.sockets import IoThread

DEFAULT_TIMEOUT = 60.0


class RpcClient:
    """Calls the server at `address` (`tcp://host:port`); connects in the background and again after a loss.

    A client without `identity` is anonymous, which is allowed only without keys. `service` names the service whose key the server must
    have. Without it the client knows the service of the hub and the channel of its identity, and tries the other keys of the job in turn.
    With `share_memory` both ends find out whether they see the same /dev/shm, which `borrow` needs. Raises ConfigError when the address or
    the keys do not fit.
    """

    def __init__(
        self,
        address: str,
        keys: KeyRing | None = None,
        identity: Identity | None = None,
        *,
        service: str | None = None,
        share_memory: bool = False,
    ) -> None:
        sockets.check_reach(address, has_keys=keys is not None, verb="connect")
        if keys is not None and identity is None:
            raise ConfigError("a client with keys must have an identity, got None; pass Identity.from_env()")
        service = service or _service_at(address, identity)
        self.address = address
        self._ids = itertools.count(1)
        self._clock = IoThread.shared().clock
        self._connection = Connection(address, identity=identity, keys=keys, service=service, share_memory=share_memory)

    @property
    def counters(self) -> Counter[str]:
        """Return the counts of calls, late replies, fenced replies, resent calls, refused connections and malformed messages."""
        return self._connection.counters

    @property
    def idle(self) -> bool:
        """Return whether no call is under way."""
        return self._connection.idle

    @property
    def shares_memory(self) -> bool:
        """Return whether server and client proved that they see the same /dev/shm."""
        return self._connection.shares_memory

    @property
    def peer(self) -> str:
        """Return the server's name, as far as known, and address."""
        return self._connection.peer

    async def call(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call `method` on the server and return its result.

        `timeout` is in seconds; None means 60. Cancelling the coroutine cancels the handler.

        Raises the error of the handler, as its own type if that is public and as RemoteError otherwise; DeadlineExceeded, WorkerLost or
        EpochFenced; TypeError or ValueError when an argument cannot be encoded.
        """
        return await wait_future(self.start_call(method, args, kwargs, timeout=timeout, idempotent=idempotent))

    def call_sync(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call `method` and block until its result is there.

        Raises the errors of `call`, and RuntimeError on the thread of an event loop.
        """
        rpc_wire.refuse_on_event_loop(f"call_sync({method!r})")
        future = self.start_call(method, args, kwargs, timeout=timeout, idempotent=idempotent)
        try:
            return future.result()
        except KeyboardInterrupt:  # nobody waits any more
            future.cancel()
            raise

    def call_future(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> CallFuture:
        """Call `method` and return the future of its result. Cancelling the future cancels the handler.

        Its callbacks run on the I/O thread, or on a thread that waits for another call of this client. They must not block.
        """
        return self.start_call(method, args, kwargs, timeout=timeout, idempotent=idempotent)

    def start_call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        waits: bool = False,
        convert: Callable[[Any], Any] | None = None,
        target: str | None = None,
    ) -> CallFuture:
        """Return `call_future(method, *args, **kwargs)`, its value passed through `convert` where its callbacks run.

        Set `waits` for a long poll, which does not count against flow control. `target` is what `method` acts on where that decides how the
        server runs it; errors name it in place of `method`.
        """
        connection = self._connection
        seconds = DEFAULT_TIMEOUT if timeout is None else rpc_wire.finite_seconds(timeout)
        number = next(self._ids)
        options: dict[str, Any] = {"timeout": seconds}
        if idempotent:
            options["idempotent"] = True
        if target is not None:
            options["target"] = target
        parts = frames.encode_message(
            "call",
            [list(args), kwargs],
            epoch=connection.epoch,
            request_id=number,
            sender=None,
            method=method,
            options=options,
        )
        call = CallFuture(
            number,
            target or method,
            parts,
            timeout=seconds,
            deadline=self._clock() + seconds,
            idempotent=idempotent,
            waits=waits,
            convert=convert,
            on_cancel=connection.abandon,
            reader=connection,
        )
        connection.submit(call)
        return call

    def borrow(self, loan: SegmentLoan, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes, from `offset` on, of a shared-memory segment that the server has lent to this process for reading.

        Nothing is copied. The view must not be written to. The memory is given back when the last array that uses the view is deleted. Raises
        FrameError if it cannot be mapped or is shorter.
        """
        return self._connection.loans.borrow(loan, offset, nbytes)

    def lent(self, loan: SegmentLoan, nbytes: int) -> LentMemory:
        """Return the first `nbytes` bytes of memory that the server has lent for writing. The caller must release them."""
        return self._connection.loans.lent(loan, nbytes)

    def release(self, loan: SegmentLoan) -> None:
        """Return a segment that the server lent and that was never borrowed."""
        self._connection.loans.release(loan)

    def set_epoch(self, epoch: int) -> None:
        """Send `epoch` from now on and refuse replies of older epochs."""
        self._connection.epoch = epoch

    def fail(self, reason: str) -> None:
        """Close the connection because the hub has declared the server lost. Pending and later calls fail with WorkerLost.

        This does not wait for the I/O thread.
        """
        self._connection.fail(reason)

    def close(self) -> None:
        """Close the connection. Pending calls fail with InfrastructureError."""
        self._connection.close()


def _service_at(address: str, identity: Identity | None) -> str | None:
    if identity is None:
        return None
    return {identity.hub: "hub", identity.channel: "channel"}.get(address)
