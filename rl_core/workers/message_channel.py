"""The channel through which the messages between workers are sent, and the receive of one message."""

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rl_core.api.errors import DeadlineExceeded, Deadlock, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle, Channel, client
from rl_core.channel.backend import PutRequest
from rl_core.messages.channel import WORKER_MESSAGES, ChannelOptions
from rl_core.messages.members import Incarnation
from rl_core.messages.tensors import TensorHeader
from rl_core.transports.handlers import HandlerThreads
from rl_core.workers.context import WorkerContext
from rl_core.workers.receive_cycles import MESSAGE

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Largest number of messages of one sender to one receiver that are stored. A further send waits until one is received."""
OPTIONS = ChannelOptions(maxsize=MOST_WAITING)
LOOK_SECONDS = 0.25
"""Seconds between two checks whether the sender is lost."""
DEADLOCK_SECONDS = 5.0
"""Seconds after which a receive asks the hub whether it is part of a cycle of receives."""
ASK_SECONDS = 1.0
REFRESH_SECONDS = 1.0
"""Seconds that a send and a receive wait for the hub to report the replacement of a lost worker."""


class MessageChannel:
    """The messages of one worker process."""

    def __init__(self, context: WorkerContext) -> None:
        """Use the channel server of the process of `context`. Raises ConfigError outside a job and a cluster."""
        self.context = context
        self.name = context.identity.name
        # The answer need not be awaited, which async methods could not: the server handles the requests of a process in order.
        client.current().create(WORKER_MESSAGES, OPTIONS)
        self.backend = client.current().backend(WORKER_MESSAGES, OPTIONS)
        self.channel = Channel(WORKER_MESSAGES, self.backend, local=False)
        self._sends: list[AsyncHandle[Any] | Future[None]] = []
        """Asynchronous sends that may not have ended yet."""

    def put(self, message: Any, receiver: str, *, transfer: str = "", timeout: float | None) -> AsyncHandle[None]:
        """Start to store `message` for the worker `group:rank`; with `transfer` as one of the messages of that transfer."""
        handle = self.channel.put(message, key=_key(self.name, receiver, transfer), async_op=True, timeout=timeout)
        assert handle is not None
        return handle

    def put_copies(
        self, message: Any, receivers: Sequence[str], *, transfer: str = "", timeout: float
    ) -> "Future[None]":
        """Start to store `message` for each of `receivers`. It is written to shared memory once. The future is done when all have it."""
        keys = [_key(self.name, receiver, transfer) for receiver in receivers]
        if not keys:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self.backend.put_copies(PutRequest(item=message, weight=0.0, key=keys[0], timeout=timeout), keys)

    def note_send(self, handle: "AsyncHandle[Any] | Future[None]") -> None:
        """Regard this process as sending until `handle` is done."""
        self._sends = [send for send in self._sends if not send.done()] + [handle]

    @property
    def sending(self) -> bool:
        """Return whether a message is on its way to the server."""
        return any(not send.done() for send in self._sends)

    def take_back(self, receiver: str, transfer: str) -> None:
        """Delete a message of `transfer` that this process has sent and `receiver` has not received yet.

        Does nothing if there is none. Blocks until the channel server has answered.
        """
        with contextlib.suppress(RLJobError):
            self.channel.get_nowait(key=_key(self.name, receiver, transfer))


class Watch:
    """Notices when a process is gone or was replaced, as far as the heartbeats tell."""

    def __init__(self, context: WorkerContext, name: str, process: Incarnation | None) -> None:
        """Watch the process with the incarnation `process` of the member `name`. None: the first process that is seen from now on."""
        self._context, self._name, self._process = context, name, process
        self._start = time.monotonic()
        self.error: BaseException | None = None
        """Error that ends the waits for the process, also if it is not lost."""

    @classmethod
    def present(cls, context: WorkerContext, name: str) -> "Watch":
        """Watch the present process of the member `name`, or the next one if it is gone."""
        member = context.member(name)
        is_present = member is not None and not member.state.gone
        if not is_present:
            context.wait_view_changed(0.0)  # The last heartbeat may be older than the replacement.
        return cls(context, name, member.incarnation if is_present and member is not None else None)

    @property
    def lost(self) -> bool:
        """Return whether the process is gone or was replaced."""
        member = self._context.member(self._name)
        if member is None:
            return False
        if self._process is None:
            if member.state.gone:
                return time.monotonic() - self._start >= REFRESH_SECONDS
            self._process = member.incarnation
        if member.incarnation < self._process:  # The last heartbeat is older than the process.
            return False
        return member.state.gone or member.incarnation != self._process

    def check(self, wait: str) -> None:
        """Raise `error` if it is set, and WorkerLost if the process is gone or was replaced. `wait` says in its text what waits for what."""
        if self.error is not None:
            raise self.error
        if self.lost:
            raise WorkerLost(f"{self._name} is gone; {wait}")


class Receipt:
    """A receive in progress. `wait` and `async_wait` return the message; they may be called several times."""

    def __init__(
        self,
        messages: MessageChannel,
        sender: str,
        timeout: float,
        convert: Callable[[Any], Any],
        *,
        transfer: str = "",
        what: str = MESSAGE,
        watch: Watch | None = None,
        convert_at_once: bool = False,
    ) -> None:
        """Start to receive the next message of `sender`; with `transfer` the next one of that transfer. `wait` returns `convert(message)`.

        `what` is reported as that for which this worker waits. `watch` None watches the present process of the sender. With
        `convert_at_once` the message is converted in a thread as soon as it arrives, else when it is waited for.
        """
        self._messages, self._sender, self._timeout, self._convert = messages, sender, timeout, convert
        self._description = what
        self._start = time.monotonic()
        self._last_query = self._start + DEADLOCK_SECONDS - ASK_SECONDS
        self._watch = Watch.present(messages.context, sender) if watch is None else watch
        key = _key(sender, messages.name, transfer)
        self._handle: AsyncHandle[Any] = messages.channel.get(key=key, async_op=True, timeout=timeout)
        self._converting = threading.Lock()
        """Held during the conversion: of several threads that wait, the first converts the message, and the others get the result too."""
        self._converted: Future[Any] | None = None
        self._will_convert = convert_at_once
        """Whether a thread converts the message, or will do so."""
        if convert_at_once:
            this = weakref.ref(self)  # A weak reference: a receipt that nobody holds gives its message back.

            def arrived() -> None:
                receipt = this()
                if receipt is not None:
                    receipt._convert_in_thread()

            self._handle.add_done_callback(arrived)

    def done(self) -> bool:
        """Return whether the message has arrived, or `wait` would raise at once.

        Of a receive by `Worker.recv_tensor` this is the tensor. `Worker.recv` of a tensor on an accelerator is done when its header has
        arrived, and `wait` receives the tensor.
        """
        return self._handle.done() and not self._will_convert

    def cancel(self) -> None:
        """Give up the receive. If its message arrives later, the next receive from the same sender gets it."""
        self._handle.cancel()

    def wait(self) -> Any:
        """Return the message. Raises WorkerLost, Deadlock or DeadlineExceeded, which name sender and receiver."""
        return self._result(self._message())

    async def async_wait(self) -> Any:
        """Return the message as `wait` does, in a coroutine."""
        message = await self._message_async()
        if isinstance(message, TensorHeader):  # The rest of receiving a tensor blocks.
            return await asyncio.wrap_future(in_thread(lambda: self._result(message), "rljob-receive-tensor"))
        return self._result(message)

    def _result(self, message: Any) -> Any:
        with self._converting:
            if self._converted is None:
                converted: Future[Any] = Future()
                try:
                    converted.set_result(self._convert(message))
                except Exception as error:  # noqa: BLE001 - each wait raises it
                    converted.set_exception(error)
                self._converted = converted
        return self._converted.result()

    def _convert_in_thread(self) -> None:
        def convert() -> None:
            try:
                self._result(self._handle.wait())
            except Exception as error:  # noqa: BLE001 - each wait raises it
                logger.debug("a receive of %s from %s failed: %s", self._messages.name, self._sender, error)
            finally:
                self._will_convert = False

        in_thread(convert, "rljob-receive-tensor")

    def _message(self) -> Any:
        context = self._messages.context
        with context.waiting(self._description, self._sender):
            while not self._handle.done():
                with contextlib.suppress(DeadlineExceeded):
                    return self._handle.wait(LOOK_SECONDS)
                self.check()
                if self._asks():
                    self._check_cycle(context.hub_client().call_sync("receive_cycle", *self._question))
        try:
            return self._handle.wait()
        except DeadlineExceeded:
            raise self._late() from None

    async def _message_async(self) -> Any:
        context = self._messages.context
        with context.waiting(self._description, self._sender):
            while not self._handle.done():
                with contextlib.suppress(DeadlineExceeded):
                    return await self._handle.async_wait(LOOK_SECONDS)
                self.check()
                if self._asks():
                    self._check_cycle(await context.hub_client().call("receive_cycle", *self._question))
        try:
            return await self._handle.async_wait()
        except DeadlineExceeded:
            raise self._late() from None

    def check(self) -> None:
        """End the receive with the error of `Watch.check` if there is one. Messages that the sender has stored were received before."""
        try:
            self._watch.check(f"{self._messages.name} waited {self._waited:.1f} s for {self._description} of it")
        except BaseException:
            self._handle.cancel()
            raise

    def _asks(self) -> bool:
        """Return whether to ask the hub for a cycle of receives. False while this worker is sending, because its messages may end the cycle."""
        now = time.monotonic()
        if self._description != MESSAGE or now - self._last_query < ASK_SECONDS or self._messages.sending:
            return False
        self._last_query = now
        return True

    @property
    def _question(self) -> tuple[str, float]:
        return self._messages.name, self._waited

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._start

    def _check_cycle(self, cycle: list[str]) -> None:
        if cycle:
            text = " waits for ".join([*cycle, cycle[0]])
            self._handle.cancel()
            raise Deadlock(
                f"deadlock: {text}; each waits in recv, or in send_tensor or broadcast of a tensor on an accelerator, so one of them must "
                "send first, or with async_op"
            )

    def _late(self) -> DeadlineExceeded:
        group = self._sender.rpartition(":")[0]
        context = self._messages.context
        groups = sorted({member.group for member in context.members()})
        return DeadlineExceeded(
            f"{self._messages.name} must receive {self._description} of {self._sender} within {self._timeout:g} s, got none"
            + (
                ""
                if context.world_size_of(group)
                else f"; it has seen no member of group {group}, but of {', '.join(groups)}"
            )
        )


def in_thread(work: Callable[[], Any], name: str) -> "Future[Any]":
    """Run `work` in a daemon thread of its own, and return its result as a future."""
    thread = HandlerThreads(1, name)
    future = thread.run(work)
    thread.close()
    return future


def _key(sender: str, receiver: str, transfer: str) -> tuple[str, ...]:
    """Return the key of the messages of a pair of workers, or of the messages of one transfer between them."""
    return (sender, receiver, transfer) if transfer else (sender, receiver)
