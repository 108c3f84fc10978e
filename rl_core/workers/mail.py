"""Messages between workers by group name and rank: `Worker.send`, `recv`, `send_tensor`, `recv_tensor` and `broadcast`.

Messages are sent through one channel of the job, with a key for each pair of sender and receiver. They therefore arrive in the order in
which they were sent, and a sender need not wait until the receiver is ready. Large arrays are passed in shared memory if both processes see
the same /dev/shm, and by socket otherwise. Tensors on devices are copied to host memory first. When a receiver is lost, the messages that
are stored for it are deleted.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rl_core.api.errors import ConfigError, DeadlineExceeded, Deadlock, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle, Channel, client
from rl_core.channel.backend import PutRequest
from rl_core.channel.handle import detach
from rl_core.messages.channel import ChannelOptions, ChannelStats
from rl_core.messages.members import MemberView
from rl_core.messages.rpc import PackedError
from rl_core.transports.rpc_wire import pack_error, rebuild_error
from rl_core.workers.context import WorkerContext

CHANNEL = "worker-messages"
MOST_WAITING = 64
"""Largest number of messages of one sender to one receiver that are stored. A further send waits until one is received."""
OPTIONS = ChannelOptions(maxsize=MOST_WAITING)
DEFAULT_SECONDS = 600.0
LOOK_SECONDS = 0.25
"""Seconds between two checks whether the sender is lost."""
DEADLOCK_SECONDS = 5.0
"""Seconds after which a receive asks the hub whether it is part of a cycle of receives."""
ASK_SECONDS = 1.0
REFRESH_SECONDS = 1.0
"""Seconds that a send and a receive wait for the hub to report the replacement of a lost worker."""
VIEW_SECONDS = 5.0
"""Seconds within which other workers see a group that was just launched. They learn of it with their heartbeats."""


def delete_stored(receiver: str) -> None:
    """Start to delete the messages that are stored for the lost worker `receiver`, so that its replacement does not receive them.

    Called in the process of the hub. Returns without waiting. Does nothing if no worker has sent a message.
    """
    try:
        backend = client.current().backend(CHANNEL, OPTIONS)
    except ConfigError:  # a hub without a channel server
        return

    def delete(asked: "Future[ChannelStats]") -> None:
        if asked.cancelled() or asked.exception() is not None:  # there is no such channel, or its server is gone
            return
        with contextlib.suppress(RLJobError):
            backend.control("move", [(key, None) for key in asked.result().keys if key[1] == receiver])

    with contextlib.suppress(RLJobError):
        backend.control("stats").add_done_callback(delete)


class Mail:
    """Sends and receives the messages of one worker process."""

    def __init__(self, context: WorkerContext) -> None:
        """Use the channel server of the process of `context`. Raises ConfigError outside a job and a cluster."""
        self._context = context
        self._name = context.identity.name
        self.epoch = context.epoch
        """Epoch whose channel server is used."""
        # The answer need not be awaited, which async methods could not: the server handles the requests of a process in order.
        client.current().create(CHANNEL, OPTIONS)
        self._backend = client.current().backend(CHANNEL, OPTIONS)
        self._channel = Channel(CHANNEL, self._backend, local=False)
        self._sends: list[AsyncHandle[None]] = []
        """Asynchronous sends that may not have ended yet."""

    def send(self, message: Any, receiver: str, *, timeout: float | None, may_block: bool) -> AsyncHandle[None]:
        """Start to send `message` to the worker `group:rank`; the handle is done when the message is stored for it.

        `may_block` allows to ask the hub whether a lost receiver has been replaced. Raises WorkerLost when the receiver is gone, ValueError
        for a rank that the group does not have.
        """
        self._check_present(receiver, may_block=may_block)
        handle = self._channel.put(message, key=(self._name, receiver), async_op=True, timeout=timeout)
        assert handle is not None
        self._sends = [send for send in self._sends if not send.done()] + [handle]
        return handle

    def broadcast(
        self, message: Any, groups: Sequence[str], *, timeout: float | None, may_block: bool
    ) -> AsyncHandle[Any]:
        """Start to send `message` to all planned members of `groups` but this worker. It is written to shared memory once.

        The handle is done when the message is stored for all, and returns it. `may_block` allows to wait some seconds for groups of which this
        process has seen no member yet, and for the replacement of a lost receiver. Raises the errors of `send`, and ValueError for a group
        without members. If nothing can be sent, because a receiver is gone or the message cannot be serialized, the other receivers get the
        error, as a PackedError, instead of the message.
        """
        seconds = DEFAULT_SECONDS if timeout is None else timeout
        try:
            self._await_seen(groups, seconds=VIEW_SECONDS if may_block else 0.0)
            receivers = self._receivers(groups)
            for receiver in receivers:
                self._check_present(receiver, may_block=may_block)
            stored = self._put_copies(message, receivers, seconds)
        except (RLJobError, TypeError, ValueError) as error:
            if present := [receiver for receiver in self._receivers(groups) if not self._is_gone(receiver)]:
                self._put_copies(pack_error(error), present, seconds)
            raise
        handle = AsyncHandle(stored, lambda none: message, detach)
        self._sends = [send for send in self._sends if not send.done()] + [handle]
        return handle

    def receive(
        self, sender: str, *, timeout: float | None, convert: Callable[[Any], Any] = lambda message: message
    ) -> "Receipt":
        """Start to receive the next message of the worker `group:rank`, whose receipt returns `convert(message)`.

        Raises ValueError for a rank that the group does not have. Other errors are raised by `wait` of the returned object.
        """
        self._member(sender)
        return Receipt(self, sender, DEFAULT_SECONDS if timeout is None else timeout, convert)

    def size_of(self, group: str) -> int:
        """Return the planned number of processes of `group`. Raises ValueError when this process sees no member of it within some seconds."""
        self._await_seen([group])
        return self._context.world_size_of(group)

    def _await_seen(self, groups: Sequence[str], *, seconds: float = VIEW_SECONDS) -> None:
        """Wait until this process has seen a member of each of `groups`, because a group may have been launched only just before."""
        deadline = time.monotonic() + seconds
        while missing := [group for group in groups if not self._context.world_size_of(group)]:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"group {missing[0]} must have members that {self._name} sees, got none; launch it first, "
                    "and name the groups that call it in its callers in a job"
                )
            self._context.wait_view_changed(LOOK_SECONDS)

    def _receivers(self, groups: Sequence[str]) -> list[str]:
        names = [f"{group}:{rank}" for group in groups for rank in range(self._context.world_size_of(group))]
        return [name for name in names if name != self._name]

    def _member(self, name: str) -> MemberView | None:
        """Return the member `group:rank`, also one that is gone; None when this process has not seen it."""
        group, _, rank = name.rpartition(":")
        member, size = self._context.member(name), self._context.world_size_of(group)
        if member is None and size and not 0 <= int(rank) < size:
            raise ValueError(f"rank of group {group} must be in [0, {size}), got {rank}")
        return member

    def _put_copies(self, message: Any, receivers: Sequence[str], seconds: float) -> "Future[None]":
        keys = [(self._name, receiver) for receiver in receivers]
        if not keys:
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing
        return self._backend.put_copies(PutRequest(item=message, weight=0.0, key=keys[0], timeout=seconds), keys)

    def _is_gone(self, name: str) -> bool:
        member = self._member(name)
        return member is not None and member.state.gone

    def _check_present(self, name: str, *, may_block: bool) -> None:
        if self._is_gone(name) and may_block:
            self._context.wait_view_changed(REFRESH_SECONDS)  # the last heartbeat may be older than the replacement
        if self._is_gone(name):
            raise WorkerLost(f"{name} is gone; {self._name} cannot send to it until it has been replaced")


class Receipt:
    """A receive in progress. `wait` and `async_wait` return the message; they may be called several times."""

    def __init__(self, mail: Mail, sender: str, timeout: float, convert: Callable[[Any], Any]) -> None:
        """Start the receive. Called by `Mail.receive`."""
        self._mail, self._sender, self._timeout, self._convert = mail, sender, timeout, convert
        self._began = time.monotonic()
        self._asked = self._began + DEADLOCK_SECONDS - ASK_SECONDS
        member = mail._context.member(sender)
        self._first = member if member is not None and not member.state.gone else None
        if self._first is None:
            mail._context.wait_view_changed(0.0)  # the last heartbeat may be older than the replacement
        key = (sender, mail._name)
        self._handle: AsyncHandle[Any] = mail._channel.get(key=key, async_op=True, timeout=timeout)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._handle.done()

    def wait(self) -> Any:
        """Return the message. Raises WorkerLost, Deadlock or DeadlineExceeded, which name sender and receiver."""
        return self._convert(self._message())

    async def async_wait(self) -> Any:
        """Return the message as `wait` does, in a coroutine."""
        return self._convert(await self._message_async())

    def _message(self) -> Any:
        context = self._mail._context
        with context.waiting("a message", self._sender):
            while not self.done():
                try:
                    return self._handle.wait(LOOK_SECONDS)
                except DeadlineExceeded:
                    self._check()
                    if self._asks():
                        self._check_cycle(context.hub_client().call_sync("receive_cycle", *self._question))
        try:
            return self._handle.wait()
        except DeadlineExceeded as error:
            raise self._late(error) from error

    async def _message_async(self) -> Any:
        context = self._mail._context
        with context.waiting("a message", self._sender):
            while not self.done():
                try:
                    return await self._handle.async_wait(LOOK_SECONDS)
                except DeadlineExceeded:
                    self._check()
                    if self._asks():
                        self._check_cycle(await context.hub_client().call("receive_cycle", *self._question))
        try:
            return await self._handle.async_wait()
        except DeadlineExceeded as error:
            raise self._late(error) from error

    def _check(self) -> None:
        """End the receive with WorkerLost if the sender is gone or was replaced. Messages that it has stored were received before."""
        member = self._mail._context.member(self._sender)
        first = self._first
        replaced = first is not None and member is not None and member.incarnation != first.incarnation
        if first is None and self._waited < REFRESH_SECONDS:
            return
        if member is not None and (member.state.gone or replaced):
            self._give_up(
                WorkerLost(
                    f"{self._sender} is gone; {self._mail._name} waited {self._waited:.1f} s for a message of it"
                )
            )

    def _asks(self) -> bool:
        """Return whether to ask the hub for a cycle of receives. False while this worker is sending, because its messages may end the cycle."""
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS or any(not send.done() for send in self._mail._sends):
            return False
        self._asked = now
        return True

    @property
    def _question(self) -> tuple[str, float]:
        return self._mail._name, self._waited

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _check_cycle(self, cycle: list[str]) -> None:
        if cycle:
            text = " waits for ".join([*cycle, cycle[0]])
            self._give_up(Deadlock(f"deadlock: {text}; each waits in recv, so one of them must send first"))

    def _late(self, error: DeadlineExceeded) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._mail._name} must receive a message of {self._sender} within {self._timeout:g} s, got none: {error}"
        )

    def _give_up(self, error: RLJobError) -> None:
        self._handle.cancel()
        raise error


def check_sent(message: Any, sender: str) -> Any:
    """Return the message of a broadcast of `sender`, or raise the error that stopped it."""
    if isinstance(message, PackedError):
        raise rebuild_error(message, method="broadcast", peer=sender)
    return message


def check_tensor(target: Any, found: Any, sender: str) -> None:
    """Raise ValueError unless `found` is a tensor or array of the shape and dtype of `target`."""
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape is None or tuple(shape) != tuple(target.shape) or str(dtype) != str(target.dtype):
        got = f"{tuple(shape)} of {dtype}" if shape is not None else f"an object of type {type(found).__name__}"
        raise ValueError(
            f"the message of {sender} must be a tensor of shape {tuple(target.shape)} and type {target.dtype}, got {got}; "
            "use recv for messages of another kind"
        )
