"""The calling end of RPC, for any thread and any event loop. `rpc_connection` does the work; see `rpc` for the protocol."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.transports import frames, rpc_wire, sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc_call import Answer, Call, CallFuture, Sink
from rl_core.transports.rpc_connection import Connection
from rl_core.transports.sockets import IoThread

DEFAULT_TIMEOUT = 60.0


class RpcClient:
    """Calls the server at `address` (`tcp://host:port`); connects in the background and again after a loss.

    `identity` None = anonymous, legal without keys only. `service` names whose key the server must have; None = known where
    `address` is the identity's hub or channel, else any of the job's keys, which are tried in turn. `share_memory`,
    `lend_arguments`: large arrays may travel through /dev/shm, and in segments of this process. Raises ConfigError when the
    address or keys do not fit.
    """

    def __init__(
        self,
        address: str,
        keys: KeyRing | None = None,
        identity: Identity | None = None,
        *,
        service: str | None = None,
        share_memory: bool = True,
        lend_arguments: bool = True,
        on_welcome: Callable[[bool], None] | None = None,
    ) -> None:
        sockets.check_reach(address, has_keys=keys is not None, verb="connect")
        if keys is not None and identity is None:
            raise ConfigError("a client with keys must have an identity, got None; pass Identity.from_env()")
        service = service or _service_at(address, identity)
        self.address = address
        self._lend_arguments = lend_arguments
        self._ids = itertools.count(1)
        self._clock = IoThread.shared().clock
        self._connection = Connection(
            address, identity=identity, keys=keys, service=service, share_memory=share_memory, on_welcome=on_welcome
        )

    @property
    def counters(self) -> Counter[str]:
        """Return calls, late, fenced, resent, refused, malformed, shared_memory, shared_memory_full."""
        return self._connection.counters

    @property
    def shares_memory(self) -> bool:
        """Return whether server and client proved that they see the same /dev/shm."""
        return self._connection.link.lends

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
        """Return what `method` returns. `timeout` None = 60 s. Cancellation cancels the handler.

        Raises the handler's error (its own type if public, else RemoteError), DeadlineExceeded, WorkerLost, EpochFenced;
        TypeError or ValueError when an argument cannot travel.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def deliver(answer: Answer) -> None:
            if future.done():
                answer.discard()
            else:
                future.set_result(answer)

        call = self._submit(
            method, args, kwargs, timeout, idempotent, lambda _, answer: _to_loop(loop, deliver, answer), inplace=True
        )
        try:
            answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().discard()
            self._connection.abandon(call)
            raise
        return answer.load()

    def call_sync(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what `method` returns, blocking the thread. Raises as `call`, and RuntimeError on an event-loop thread."""
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
        """Return a concurrent.futures.Future of what `method` returns; cancelling it cancels the handler.

        Its callbacks run on the I/O thread, or on the thread that waits in `result()`; they must not block.
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
    ) -> CallFuture:
        """Return `call_future(method, *args, **kwargs)`, its value passed through `convert`.

        `waits`: it waits at the server until others call too, and leaves them the credit.
        """
        future = CallFuture(self._connection)

        def sink(_: str, answer: Answer) -> None:
            if not future.set_running_or_notify_cancel():
                answer.discard()
                return
            try:
                value = answer.load()
                future.set_result(value if convert is None else convert(value))
            except Exception as error:  # noqa: BLE001 - the future carries it to whoever asks
                future.set_exception(error)

        future.bind(self._submit(method, args, kwargs, timeout, idempotent, sink, inplace=False, waits=waits))
        return future

    async def stream(
        self, method: str, /, *args: Any, timeout: float | None = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Yield what the generator `method` yields. `timeout` bounds each wait for the next item. Raises as `call`.

        Leaving the loop early cancels the handler. Raises ConfigError when `method` is no generator.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[str, Answer]] = asyncio.Queue()

        reading = True

        def sink(kind: str, answer: Answer) -> None:
            def arrive(answer: Answer) -> None:
                if reading:
                    arrived.put_nowait((kind, answer))
                else:  # it was on its way to the loop when the reader left
                    answer.discard()

            _to_loop(loop, arrive, answer)

        call = self._submit(method, args, kwargs, timeout, False, sink, inplace=True, stream=True)
        half, taken = rpc_wire.STREAM_WINDOW // 2, 0
        try:
            while True:
                self._connection.time(call, True)
                kind, answer = await arrived.get()
                self._connection.time(call, False)
                if kind == "end":
                    return
                value = answer.load()
                if kind == "reply":
                    raise ConfigError(f"{method} at {self.peer} gives one answer and no stream; use call()")
                taken += 1
                if taken % half == 0:
                    self._connection.grant(call, half)
                yield value
        finally:
            reading = False
            while not arrived.empty():
                arrived.get_nowait()[1].discard()
            if not call.ended:
                self._connection.abandon(call)

    def borrow(self, placement: frames.Placement, nbytes: int) -> memoryview:
        """Return memory that the server lent by name; it is given back when the last array over it dies."""
        return self._connection.link.resolve(placement, nbytes)

    def give_back(self, placement: frames.Placement) -> None:
        """Give back what the server lent by name and nobody borrowed."""
        self._connection.link.give_back(placement)

    def set_epoch(self, epoch: int) -> None:
        """Send `epoch` from now on and refuse answers of older ones."""
        self._connection.epoch = epoch

    def fail(self, reason: str) -> None:
        """Fail all calls under way with WorkerLost: the hub declared the server dead."""
        self._connection.fail(reason)

    def close(self) -> None:
        """Close the connection; calls under way fail with InfrastructureError."""
        self._connection.close()

    def _submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        idempotent: bool,
        sink: Sink,
        *,
        inplace: bool,
        waits: bool = False,
        stream: bool = False,
    ) -> Call:
        connection = self._connection
        seconds = DEFAULT_TIMEOUT if timeout is None else rpc_wire.finite_seconds(timeout)
        number = next(self._ids)
        options: dict[str, Any] = {"timeout": seconds}
        if idempotent:
            options["idempotent"] = True
        if stream:
            options["stream"] = True
        place = connection.link.place if connection.link.lends and self._lend_arguments else None
        body = [list(args), kwargs]
        parts = frames.encode_message(
            "call",
            body,
            epoch=connection.epoch,
            request_id=number,
            sender=None,
            method=method,
            options=options,
            place=place,
        )
        deadline = self._clock() + seconds
        call = Call(
            number, method, parts, sink,
            timeout=seconds, deadline=deadline, idempotent=idempotent, inplace=inplace, waits=waits,
        )  # fmt: skip
        connection.submit(call)
        return call


def _service_at(address: str, identity: Identity | None) -> str | None:
    if identity is None:
        return None
    return {identity.hub: "hub", identity.channel: "channel"}.get(address)


def _to_loop(loop: asyncio.AbstractEventLoop, deliver: Callable[[Answer], None], answer: Answer) -> None:
    try:
        loop.call_soon_threadsafe(deliver, answer)
    except RuntimeError:  # the loop was closed while the call was under way: nobody waits
        answer.discard()
