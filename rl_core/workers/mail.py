"""Messages between workers by group name and rank: `Worker.send`, `recv`, `send_tensor`, `recv_tensor` and `broadcast`.

Messages travel through one channel of the job, with a key for each pair of sender and receiver. So they arrive in the order of the sends,
need no moment at which both ends are ready, and large arrays go through shared memory where both ends see the same /dev/shm, and by socket
elsewhere. Tensors of devices travel through host memory.
"""

import time
from collections.abc import Sequence
from typing import Any

from rl_core.api.errors import DeadlineExceeded, Deadlock, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle, Channel, client
from rl_core.channel.backend import PutRequest
from rl_core.channel.handle import wait_sync
from rl_core.messages.channel import ChannelOptions
from rl_core.messages.members import MemberView
from rl_core.workers.context import WorkerContext

CHANNEL = "worker-messages"
MOST_WAITING = 64
"""Messages of one sender to one receiver that may wait to be received; a further send waits."""
DEFAULT_SECONDS = 600.0
LOOK_SECONDS = 0.25
"""Seconds between two looks whether the sender is lost."""
DEADLOCK_SECONDS = 5.0
"""Seconds after which a receive asks the hub whether it is part of a cycle of receives."""
ASK_SECONDS = 1.0
VIEW_SECONDS = 5.0
"""Seconds within which a launched group is seen by the others; heartbeats tell of it."""


class Mail:
    """Sends and receives the messages of one worker process."""

    def __init__(self, context: WorkerContext) -> None:
        """Use the channel server of the process of `context`. Raises ConfigError outside a job and a cluster."""
        self._context = context
        self._name = context.identity.name
        self.epoch = context.epoch
        """Epoch whose channel server is used."""
        # The answer need not be awaited, which async methods could not: the server handles the requests of a process in order.
        options = ChannelOptions(maxsize=MOST_WAITING)
        client.current().create(CHANNEL, options)
        self._backend = client.current().backend(CHANNEL, options)
        self._channel = Channel(CHANNEL, self._backend, local=False)
        self._sends: list[AsyncHandle[None]] = []
        """Asynchronous sends that may be under way."""

    def send(self, message: Any, receiver: str, *, timeout: float | None) -> AsyncHandle[None]:
        """Start to send `message` to the worker `group:rank`; the handle is done when the message is stored for it.

        Raises WorkerLost when the receiver is gone, ValueError for a rank that the group does not have.
        """
        self._check_present(receiver)
        handle = self._channel.put(message, key=(self._name, receiver), async_op=True, timeout=timeout)
        assert handle is not None
        self._sends = [send for send in self._sends if not send.done()] + [handle]
        return handle

    def send_copies(self, message: Any, receivers: Sequence[str], *, timeout: float | None) -> None:
        """Send `message` to several workers; it is written to shared memory once. Returns when it is stored for all.

        Raises as `send`, and DeadlineExceeded.
        """
        for receiver in receivers:
            self._check_present(receiver)
        if not receivers:
            return
        keys = [(self._name, receiver) for receiver in receivers]
        seconds = DEFAULT_SECONDS if timeout is None else timeout
        request = PutRequest(item=message, weight=0.0, key=keys[0], timeout=seconds)
        wait_sync(lambda: self._backend.put_copies(request, keys), "Worker.broadcast")

    def receive(self, sender: str, *, timeout: float | None) -> "Receipt":
        """Start to receive the next message of the worker `group:rank`.

        Raises ValueError for a rank that the group does not have. The returned object raises what happens to the receive.
        """
        self._member(sender)
        return Receipt(self, sender, DEFAULT_SECONDS if timeout is None else timeout)

    def receivers(self, groups: Sequence[str]) -> list[str]:
        """Return the names of all planned members of `groups`.

        A group that was launched a moment ago is waited for. Raises ValueError for one of which this process sees no member.
        """
        deadline = time.monotonic() + VIEW_SECONDS
        while missing := [group for group in groups if not self._context.members(group)]:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"group {missing[0]} must have members that {self._name} sees, got none; launch it first, "
                    "and name the groups that call it in its callers in a job"
                )
            self._context.wait_view_changed(LOOK_SECONDS)
        sizes = {group: max(member.world_size for member in self._context.members(group)) for group in groups}
        return [f"{group}:{rank}" for group, size in sizes.items() for rank in range(size)]

    def _member(self, name: str) -> MemberView | None:
        """Return the member `group:rank`, also one that is gone; None when this process has not seen it."""
        group, _, rank = name.rpartition(":")
        member = self._context.member(name)
        sizes = [other.world_size for other in self._context.members(group)]
        if member is None and sizes and not 0 <= int(rank) < max(sizes):
            raise ValueError(f"rank of group {group} must be in [0, {max(sizes)}), got {rank}")
        return member

    def _check_present(self, name: str) -> None:
        member = self._member(name)
        if member is not None and member.state.gone:
            raise WorkerLost(f"{name} is gone; {self._name} cannot send to it until it has been replaced")


class Receipt:
    """A receive that is under way. `wait` and `async_wait` return the message, and may be called again."""

    def __init__(self, mail: Mail, sender: str, timeout: float) -> None:
        """Start the receive. Called by `Mail.receive`."""
        self._mail, self._sender, self._timeout = mail, sender, timeout
        self._began = time.monotonic()
        self._asked = self._began + DEADLOCK_SECONDS - ASK_SECONDS
        member = mail._context.member(sender)
        self._first = member if member is not None and not member.state.gone else None
        key = (sender, mail._name)
        self._handle: AsyncHandle[Any] = mail._channel.get(key=key, async_op=True, timeout=timeout)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._handle.done()

    def wait(self) -> Any:
        """Return the message. Raises WorkerLost, Deadlock or DeadlineExceeded, which name sender and receiver."""
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

    async def async_wait(self) -> Any:
        """Return the message as `wait` does, in a coroutine."""
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
        """Give up when the sender is gone, or was replaced since this receive began. Its stored messages have been received before."""
        member = self._mail._context.member(self._sender)
        first = self._first
        replaced = first is not None and member is not None and member.incarnation != first.incarnation
        if member is not None and (member.state.gone or replaced):
            self._give_up(
                WorkerLost(
                    f"{self._sender} is gone; {self._mail._name} waited {self._waited:.1f} s for a message of it"
                )
            )

    def _asks(self) -> bool:
        """Return whether to ask the hub for a cycle. Not while messages of this worker are on their way: they may end it."""
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


def check_tensor(target: Any, found: Any, sender: str) -> None:
    """Raise ValueError unless `found` is a tensor or array of the shape and dtype of `target`."""
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape is None or tuple(shape) != tuple(target.shape) or str(dtype) != str(target.dtype):
        got = f"{tuple(shape)} of {dtype}" if shape is not None else f"an object of type {type(found).__name__}"
        raise ValueError(
            f"the message of {sender} must be a tensor of shape {tuple(target.shape)} and type {target.dtype}, got {got}; "
            "use recv for messages of another kind"
        )
