"""Tensors on accelerators between two workers: `Worker.send_tensor` and `recv_tensor`.

The sender stores a header in the place of a message, so that tensors and other messages arrive in the order in which they were sent. The
receiver answers where it wants the tensor, and the sender chooses the transport by where both ends are:

- on the same accelerator: the receiver maps the memory of the sender (CUDA IPC) and copies it;
- on two accelerators: a process group of the two (NCCL), which is kept and formed again after an error or a loss;
- otherwise, and if the receiver cannot map the memory or the group cannot be formed: through host memory, as other messages.

`rl_core.messages.tensors` lists the messages, `tensor_exchange` sends and receives them.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.channel import AsyncHandle
from rl_core.channel.handle import detach
from rl_core.messages.members import Incarnation
from rl_core.messages.tensors import DeviceMemory, TensorHeader, TensorLocation, TensorTarget, TransportUnavailable
from rl_core.messages.weights import GroupPlan
from rl_core.plan.groups import kinds_of_environment
from rl_core.transports.sockets import split_address
from rl_core.transports.tokens import host_token
from rl_core.workers.message_channel import MessageChannel, Receipt, Watch, in_thread
from rl_core.workers.receive_cycles import MESSAGE
from rl_core.workers.tensor_exchange import TENSOR, TensorExchange
from rl_core.workers.tensor_memory import (
    accelerator_of,
    after_queued,
    check_tensor,
    flat_bytes,
    row_major,
    writable_bytes,
)

if TYPE_CHECKING:
    import torch

    from rl_core.collective.pair import PairGroups

logger = logging.getLogger(__name__)

IPC = "ipc"
HOST = "host"
FORM_SECONDS = 30.0
"""Seconds for forming a process group. After them the tensor goes through host memory."""
STUCK_SECONDS = 1.0
"""Seconds after which a formation that does not end by itself in time is given up. NCCL may block in it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that is received into."""

    tensor: Any
    device: str
    """UUID of the accelerator that holds `tensor`; "" if it is in host memory."""
    ready: Callable[[], None]
    """Blocks until the accelerator has run the operations on `tensor` that were queued before the receive, so that it can be overwritten."""


@dataclass(slots=True)
class _Route:
    """What this process knows of the transports to one process of a receiver."""

    process: Incarnation | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the transfer that uses the group."""
    unavailable: set[str] = field(default_factory=set)
    """Transports that have turned out not to work."""


class TensorTransfers:
    """The transfers of one worker process. Methods may be called by any thread."""

    def __init__(
        self, messages: MessageChannel, *, backend: str = "nccl", accelerator_of: Callable[[Any], str] = accelerator_of
    ) -> None:
        """Send and receive with `messages`.

        Tests pass the backend gloo, and a function that names an accelerator for tensors of the CPU.
        """
        self._messages, self._backend, self._accelerator_of = messages, backend, accelerator_of
        self._context, self._name = messages.context, messages.name
        self._routes: dict[str, _Route] = {}
        self._pairs: PairGroups | None = None
        self.sent: Counter[str] = Counter()
        """Number of tensors on accelerators that were sent, by transport: ipc, nccl or host."""
        self._lock = threading.Lock()
        """Guards the three fields above."""

    def header(self, tensor: Any) -> TensorHeader | None:
        """Return the header of a tensor on an accelerator; None for what is sent as any other message."""
        device = self._accelerator_of(tensor)
        if not device or not tensor.nbytes:
            return None
        return TensorHeader(
            transfer=secrets.token_hex(8),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype),
            location=TensorLocation(device=device, host_token=host_token()),
            incarnation=self._context.identity.incarnation,
        )

    def target(self, tensor: Any) -> Target:
        """Return the target of a receive into `tensor`."""
        return Target(tensor, self._accelerator_of(tensor), after_queued(tensor))

    def send(
        self, tensor: Any, header: TensorHeader, receiver: str, *, seconds: float, waited_for: bool
    ) -> AsyncHandle[None]:
        """Start to send a tensor, whose header is stored for the receiver. The handle is done when the receiver has the tensor.

        If it goes through host memory, the handle is done when it is stored for the receiver. `waited_for` says that the caller waits for
        the handle. The handle raises WorkerLost, Deadlock, DeadlineExceeded, and the error of the receiver.
        """
        watch, ready = Watch.present(self._context, receiver), after_queued(tensor)
        exchange = TensorExchange(self._messages, receiver, header.transfer, seconds, watch)
        stored = self._messages.put(header, receiver, timeout=seconds)
        self._messages.note_send(stored)

        def deliver() -> None:
            stored.wait()
            with exchange.reporting_errors():
                target = exchange.receive_target(MESSAGE if waited_for else TENSOR)
                ready()
                self._deliver(exchange, tensor.detach(), header, target)

        return AsyncHandle(in_thread(deliver, "rljob-send-tensor"), lambda none: none, detach)

    def receive(self, header: TensorHeader, sender: str, seconds: float, target: Target | None = None) -> Any:
        """Receive the tensor of `header` into `target` and return None, or return it in host memory.

        It is returned for a target in host memory, for None, and when the ends have no other transport. Raises ValueError for a target of
        another shape or type, WorkerLost, DeadlineExceeded, and the error of the sender. All errors are raised at the sender as well.
        """
        watch = Watch(self._context, sender, header.incarnation)
        exchange = TensorExchange(self._messages, sender, header.transfer, seconds, watch)
        with exchange.reporting_errors():
            if target is not None:
                check_tensor(target.tensor, header, sender)
            device = "" if target is None else target.device
            exchange.post(
                TensorTarget(
                    location=TensorLocation(device=device, host_token=host_token()),
                    group=self._groups.key_of(sender) if device else "",
                )
            )
            while True:
                message = exchange.receive(TENSOR)
                if target is None or not device or not isinstance(message, GroupPlan | DeviceMemory):
                    return message
                target.ready()
                with writable_bytes(target.tensor) as data:
                    reason = self._fill(exchange, message, data)
                exchange.post(TransportUnavailable(reason=reason) if reason else None)
                if not reason:
                    return None

    def close(self) -> None:
        """Leave all process groups."""
        with self._lock:
            groups, self._pairs = self._pairs, None
        if groups is not None:
            groups.close()

    # --- the sender's end ------------------------------------------------------------------------------------------

    def _deliver(
        self, exchange: TensorExchange, tensor: "torch.Tensor", header: TensorHeader, target: TensorTarget
    ) -> None:
        route = self._route(exchange.peer)
        if not route.lock.acquire(timeout=exchange.seconds_left):
            raise DeadlineExceeded(
                f"{self._name} could not send to {exchange.peer} in time: earlier tensors are on their way"
            )
        try:
            transport = self._transport(header.location, target.location, exchange.peer)
            if transport != HOST and transport not in route.unavailable:
                by_group = transport == self._backend
                reason = self._send_by_group(exchange, tensor, target) if by_group else _send_by_ipc(exchange, tensor)
                if not reason:
                    self._count(transport)
                    return
                logger.warning("tensors from %s to %s go through host memory: %s", self._name, exchange.peer, reason)
                route.unavailable.add(transport)
            exchange.post(tensor.cpu()).wait()
            self._count(HOST)
        finally:
            route.lock.release()

    def _count(self, transport: str) -> None:
        with self._lock:
            self.sent[transport] += 1

    def _transport(self, own: TensorLocation, other: TensorLocation, receiver: str) -> str:
        """Return the transport between two locations. If it turns out to be unavailable, host memory takes its place."""
        if not other.device or not self._trusts(receiver):
            return HOST
        if own.device == other.device:  # a group cannot use an accelerator twice
            return IPC if own.host_token == other.host_token else HOST
        return self._backend

    def _trusts(self, peer: str) -> bool:
        """Return whether this process may share memory or form a process group with `peer`.

        In a job both groups must hold the model. The others run code that must not reach the trainer, and the network rules separate them.
        """
        if self._context.job is None:
            return True
        kinds = kinds_of_environment()
        groups = [self._context.identity.group, peer.rpartition(":")[0]]
        return all(group in kinds and kinds[group].holds_model for group in groups)

    def _route(self, receiver: str) -> _Route:
        member = self._context.member(receiver)
        process = None if member is None else member.incarnation
        with self._lock:
            route = self._routes.get(receiver)
            if route is None or route.process != process:
                route = self._routes[receiver] = _Route(process)
            return route

    def _send_by_group(self, exchange: TensorExchange, tensor: "torch.Tensor", target: TensorTarget) -> str:
        """Send the tensor over a process group. Return "" when the receiver has it, or why the group could not be formed."""
        from rl_core.collective.pair import NotFormed

        groups = self._groups
        try:
            plan = groups.plan(exchange.peer, target.group)
        except NotFormed as error:
            return str(error)
        with exchange.reporting_errors(lambda error: groups.abort(plan, str(error))):
            exchange.post(plan)
            reply = exchange.receipt(TENSOR)
            try:
                sending = self._broadcast(exchange, plan, flat_bytes(row_major(tensor)), reply)
            except NotFormed as error:
                groups.abort(plan, str(error))  # ends the formation at the receiver
                answer = reply.wait()
                return answer.reason if isinstance(answer, TransportUnavailable) else str(error)
            except BaseException as error:
                reply.cancel()
                if isinstance(error, InfrastructureError):
                    exchange.raise_original(error)
                raise
            answer = reply.wait()
            if isinstance(answer, TransportUnavailable) or sending is None:
                reason = answer.reason if isinstance(answer, TransportUnavailable) else "the receiver has not formed it"
                groups.abort(plan, reason)
                return reason
            exchange.wait_for(sending)
            sending.result()
        return ""

    # --- the receiver's end ----------------------------------------------------------------------------------------

    def _fill(self, exchange: TensorExchange, message: GroupPlan | DeviceMemory, data: "torch.Tensor") -> str:
        """Receive `data`. Return "" when it has arrived, or why this process cannot receive by this transport."""
        if not self._trusts(exchange.peer):
            raise InfrastructureError(
                f"{exchange.peer} must send through host memory to {self._name}; one of the groups holds no model"
            )
        if isinstance(message, GroupPlan):
            return self._receive_by_group(exchange, message, data)
        return _receive_by_ipc(message, data)

    def _receive_by_group(self, exchange: TensorExchange, plan: GroupPlan, data: "torch.Tensor") -> str:
        """Receive `data` over a process group. Return "" when it has arrived, or why the group could not be formed."""
        from rl_core.collective.pair import NotFormed

        if plan.members != (exchange.peer, self._name):
            raise InfrastructureError(f"{self._name} must not form a process group of {', '.join(plan.members)}")
        groups = self._groups
        with exchange.reporting_errors(lambda error: groups.abort(plan, str(error))):
            try:
                self._broadcast(exchange, plan, data)
            except NotFormed as error:
                return str(error)
            except InfrastructureError as error:
                exchange.raise_original(error)
                raise
        return ""

    # --- both ends -------------------------------------------------------------------------------------------------

    def _broadcast(
        self, exchange: TensorExchange, plan: GroupPlan, data: "torch.Tensor", reply: Receipt | None = None
    ) -> "Future[None] | None":
        """Send or receive `data` over the group of `plan`, which is formed first if necessary.

        Returns the broadcast when it has ended or `reply` has arrived, None when `reply` has arrived before the group was formed. Formation and
        broadcast run in threads of their own, because the libraries may block in them. Raises NotFormed, the errors of
        `TensorGroup.broadcast`, and those of `TensorExchange.wait_for`.
        """
        from rl_core.collective.pair import NotFormed

        groups = self._groups
        group = groups.formed(plan)
        if group is None:
            seconds = min(FORM_SECONDS, exchange.seconds_left / 2)
            forming = in_thread(lambda: groups.form(plan, data.device, timeout=seconds), "rljob-form-tensor-group")
            exchange.wait_for(forming, until=time.monotonic() + seconds + STUCK_SECONDS, or_done=reply)
            if forming.done():
                group = forming.result()
            elif reply is not None and reply.done():
                return None
            else:
                groups.abort(plan, "its formation is stuck")
                raise NotFormed(f"group {plan.key} must be formed within {seconds:g} s, {self._name} still connects")
        left = exchange.seconds_left
        transfer = in_thread(lambda: group.broadcast(data, timeout=left), "rljob-broadcast-tensor")
        exchange.wait_for(transfer, or_done=reply)
        if transfer.done():
            transfer.result()
        return transfer

    @property
    def _groups(self) -> "PairGroups":
        from rl_core.collective.pair import PairGroups

        with self._lock:
            if self._pairs is None:
                host = split_address(self._context.address)[0]
                self._pairs = PairGroups(name=self._name, host=host, epoch=self._context.epoch, backend=self._backend)
            return self._pairs


def _send_by_ipc(exchange: TensorExchange, tensor: "torch.Tensor") -> str:
    """Let the receiver copy the tensor from the memory of this process. Return "" when it has, or why it could not map the memory."""
    import torch

    from rl_core.weights.device_buffer import handle_of

    memory = row_major(tensor)
    if not memory.is_cuda:  # shared memory must not take the place of the caller's
        memory = memory.clone()
    try:
        handle = handle_of(memory.untyped_storage())
    except RuntimeError as error:  # torch raises nothing narrower
        return str(error).partition("\n")[0]
    exchange.post(DeviceMemory(handle=handle, start=memory.storage_offset() * memory.itemsize))
    answer = exchange.receive(TENSOR)
    del memory
    if tensor.is_cuda:
        torch.cuda.ipc_collect()
    return answer.reason if isinstance(answer, TransportUnavailable) else ""


def _receive_by_ipc(memory: DeviceMemory, data: "torch.Tensor") -> str:
    """Copy `data` from the memory of the sender. Return "" when it has arrived, or why the memory could not be mapped."""
    from rl_core.weights.device_buffer import mapped

    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(mapped(memory.handle, str(data.device)))
        except RuntimeError as error:  # torch raises nothing narrower
            return str(error).partition("\n")[0]
        data.copy_(source[memory.start : memory.start + data.numel()])
    return ""
