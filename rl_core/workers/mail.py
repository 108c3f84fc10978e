"""Messages between workers by group name and rank: `Worker.send`, `recv`, `send_tensor`, `recv_tensor` and `broadcast`.

Messages are sent through one channel of the job, with a key for each pair of sender and receiver. They therefore arrive in the order in
which they were sent, and a sender need not wait until the receiver is ready. Large arrays are passed in shared memory if both processes see
the same /dev/shm, and by socket otherwise. Of a tensor on an accelerator only a header is stored; `tensors` sends the rest when it is
received. When a receiver is lost, the messages that are stored for it are deleted.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from rl_core.api.errors import ConfigError, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle, client
from rl_core.channel.handle import detach
from rl_core.messages.channel import WORKER_MESSAGES, ChannelStats
from rl_core.messages.members import MemberView
from rl_core.messages.rpc import PackedError
from rl_core.messages.tensors import TensorHeader
from rl_core.plan.groups import kinds_of_environment
from rl_core.transports.rpc_wire import finite_seconds, pack_error, rebuild_error
from rl_core.workers.context import WorkerContext
from rl_core.workers.message_channel import LOOK_SECONDS, OPTIONS, REFRESH_SECONDS, MessageChannel, Receipt
from rl_core.workers.tensor_memory import check_tensor
from rl_core.workers.tensors import TensorTransfers

DEFAULT_SECONDS = 600.0
START_SECONDS = 30.0
"""Seconds that a send waits for the first member of a group, which may still start."""
VIEW_SECONDS = 5.0
"""Seconds within which other workers see a group that was just launched. They learn of it with their heartbeats."""


def delete_stored(receiver: str) -> None:
    """Start to delete the messages that are stored for the lost worker `receiver`, so that its replacement does not receive them.

    Called in the process of the hub. Returns without waiting. Does nothing if no worker has sent a message.
    """
    try:
        backend = client.current().backend(WORKER_MESSAGES, OPTIONS)
    except ConfigError:  # The hub has no channel server.
        return

    def delete(answer: "Future[ChannelStats]") -> None:
        if answer.cancelled() or answer.exception() is not None:  # There is no such channel, or its server is gone.
            return
        with contextlib.suppress(RLJobError):
            backend.control("move", [(key, None) for key in answer.result().keys if key[1] == receiver])

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
        self._messages = MessageChannel(context)
        self._tensors = TensorTransfers(self._messages)

    def close(self) -> None:
        """Leave the process groups in which tensors were sent."""
        self._tensors.close()

    def send(self, message: Any, receiver: str, *, timeout: float | None, may_block: bool) -> AsyncHandle[None]:
        """Start to send `message` to the worker `group:rank`; the handle is done when the message is stored for it.

        `may_block` allows to wait for a group that still starts, and to ask the hub whether a lost receiver has been replaced. Raises
        WorkerLost when the receiver is gone, ValueError for a rank that the group does not have and for a group that does not exist.
        """
        self._check_exists(receiver, timeout=timeout, may_block=may_block)
        self._check_present(receiver, may_block=may_block)
        handle = self._messages.put(message, receiver, timeout=timeout)
        self._messages.note_send(handle)
        return handle

    def send_tensor(self, tensor: Any, receiver: str, *, timeout: float | None, may_block: bool) -> AsyncHandle[None]:
        """Start to send a tensor or array as `send` does. That of a tensor on an accelerator is done when the receiver has the tensor.

        `may_block` also says that the caller waits for the returned handle, so that this worker may be part of a cycle of receives.
        """
        header = self._tensors.header(tensor) if receiver != self._name else None
        if header is None:
            on_device = getattr(tensor, "device", "cpu") != "cpu" and hasattr(tensor, "cpu")
            message = tensor.detach().cpu() if on_device else tensor
            return self.send(message, receiver, timeout=timeout, may_block=may_block)
        seconds = _seconds(timeout)
        self._check_exists(receiver, timeout=timeout, may_block=may_block)
        self._check_present(receiver, may_block=may_block)
        future = self._tensors.send(tensor, header, [receiver], seconds=seconds, waited_for=may_block)
        return AsyncHandle(future, lambda result: result, detach)

    def broadcast(
        self, message: Any, groups: Sequence[str], *, timeout: float | None, may_block: bool
    ) -> AsyncHandle[Any]:
        """Start to send `message` to all planned members of `groups` but this worker. It is written to shared memory once.

        The handle is done when the message is stored for all, and returns it. A tensor on an accelerator is sent to each as by `send_tensor`,
        and the handle is done when all have it. `may_block` allows to wait some seconds for groups of which this
        process has seen no member yet, and for the replacement of a lost receiver. Raises the errors of `send`, and ValueError for a group
        without members. If nothing can be sent, because a receiver is gone or the message cannot be serialized, the other receivers get the
        error, as a PackedError, instead of the message.
        """
        seconds = _seconds(timeout)
        try:
            self._await_seen(groups, seconds=VIEW_SECONDS if may_block else 0.0)
            receivers = self._receivers(groups)
            for receiver in receivers:
                self._check_present(receiver, may_block=may_block)
            header = self._tensors.header(message, receivers=len(receivers))
            if header is not None:
                future = self._tensors.send(message, header, receivers, seconds=seconds, waited_for=may_block)
            else:
                future = self._messages.put_copies(message, receivers, timeout=seconds)
                self._messages.note_send(future)
        except (RLJobError, TypeError, ValueError) as error:
            if present := [receiver for receiver in self._receivers(groups) if not self._is_gone(receiver)]:
                self._messages.put_copies(pack_error(error), present, timeout=seconds)
            raise
        return AsyncHandle(future, lambda result: message, detach)

    def receive(self, sender: str, *, timeout: float | None, at_once: bool = False) -> Receipt:
        """Start to receive the next message of the worker `group:rank`.

        `at_once` receives a tensor on an accelerator of the sender while nobody waits for the receipt. Raises ValueError for a rank that the
        group does not have. Other errors are raised by `wait` of the returned object.
        """

        def open_message(message: Any, seconds: float) -> Any:
            return self._tensors.receive(message, sender, seconds) if isinstance(message, TensorHeader) else message

        return self._receive(sender, timeout, open_message, at_once=at_once)

    def receive_broadcast(self, obj: Any, sender: str, *, timeout: float | None, waited_for: bool) -> Receipt:
        """Start to receive the message of a broadcast: as `receive_tensor` does if `obj` is a tensor on an accelerator, else as `receive` does."""
        if self._tensors.target(obj).device:
            return self.receive_tensor(obj, sender, timeout=timeout, waited_for=waited_for)
        return self.receive(sender, timeout=timeout, at_once=not waited_for)

    def receive_tensor(self, tensor: Any, sender: str, *, timeout: float | None, waited_for: bool) -> Receipt:
        """Start to receive the next message of the worker `group:rank` into `tensor`, which the receipt returns, as `receive` does.

        The receipt raises ValueError for a message of another shape or type. A sender whose tensor is on an accelerator gets it as well.
        `waited_for` says that the caller waits for the receipt. Otherwise a tensor on an accelerator is received while nobody waits, because
        the caller may wait for the send of another tensor first.
        """
        target = self._tensors.target(tensor)

        def store(message: Any, seconds: float) -> Any:
            if isinstance(message, TensorHeader):
                message = self._tensors.receive(message, sender, seconds, target)
                if message is None:
                    return tensor
            check_tensor(tensor, message, sender)
            tensor[...] = message
            return tensor

        return self._receive(sender, timeout, store, at_once=bool(target.device) and not waited_for)

    def _receive(
        self, sender: str, timeout: float | None, open_message: Callable[[Any, float], Any], *, at_once: bool = False
    ) -> Receipt:
        """Start to receive a message. The receipt returns `open_message(message, seconds that are left)`, or raises what stopped a broadcast."""
        self._check_exists(sender, timeout=timeout, may_block=False)
        self._member(sender)
        seconds = _seconds(timeout)
        deadline = time.monotonic() + seconds

        def convert(message: Any) -> Any:
            if isinstance(message, PackedError):
                raise rebuild_error(message, method="broadcast", peer=sender)
            return open_message(message, max(0.0, deadline - time.monotonic()))

        return Receipt(self._messages, sender, seconds, convert, convert_at_once=at_once)

    def size_of(self, group: str) -> int:
        """Return the planned number of processes of `group`. Raises ValueError when this process sees no member of it within some seconds."""
        self._await_seen([group])
        return self._context.world_size_of(group)

    def _await_seen(self, groups: Sequence[str], *, seconds: float = VIEW_SECONDS) -> None:
        """Wait until this process has seen a member of each of `groups`, because a group may have been launched only just before."""
        deadline = time.monotonic() + seconds
        for group in groups:
            if self._context.world_size_of(group):
                continue
            with self._context.waiting("the first member", group):
                while not self._context.world_size_of(group):
                    if time.monotonic() >= deadline:
                        groups_seen = sorted({member.group for member in self._context.members()})
                        raise ValueError(
                            f"group {group} must have members that {self._name} sees, got none; it sees members of {', '.join(groups_seen)}; "
                            "launch the group first, and name the groups that call it in its callers in a job"
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

    def _is_gone(self, name: str) -> bool:
        member = self._member(name)
        return member is not None and member.state.gone

    def _check_exists(self, name: str, *, timeout: float | None, may_block: bool) -> None:
        """Raise ValueError if the group of `name` does not exist.

        In a job these are the groups that it declares. In a script a group exists once it has had a member; a caller that may block waits
        for one, and any other caller is not checked.
        """
        group = name.rpartition(":")[0]
        if self._context.world_size_of(group):
            return
        if self._context.job is None:
            if may_block:
                self._await_seen([group], seconds=START_SECONDS if timeout is None else min(timeout, START_SECONDS))
        elif group not in self._declared:
            raise ValueError(f"group must be one of the job ({', '.join(self._declared)}), got {group!r}")

    @cached_property
    def _declared(self) -> Sequence[str]:
        return sorted(kinds_of_environment())

    def _check_present(self, name: str, *, may_block: bool) -> None:
        if self._is_gone(name) and may_block:
            self._context.wait_view_changed(REFRESH_SECONDS)  # The last heartbeat may be older than the replacement.
        if self._is_gone(name):
            raise WorkerLost(f"{name} is gone; {self._name} cannot send to it until it has been replaced")


def _seconds(timeout: float | None) -> float:
    return DEFAULT_SECONDS if timeout is None else finite_seconds(timeout)
