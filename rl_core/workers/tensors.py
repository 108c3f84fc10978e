"""Tensors on accelerators between workers: `Worker.send_tensor`, `recv_tensor` and `broadcast`.

The sender stores a header in place of a message, so that tensors and other messages arrive in the order in which they were sent. The
receiver answers on which device it wants the tensor, and the sender chooses the transport by where both ends are, for each receiver of a broadcast:

- on the same accelerator: the receiver maps the memory of the sender (CUDA IPC) and copies it;
- on two accelerators: a process group of the two (NCCL), which is kept and formed again after an error or a loss;
- otherwise, and if the receiver cannot map the memory or the group cannot be formed: through host memory, as other messages.

A broadcast sends to all receivers at once. Each of these transfers holds only the lock of its own sender and receiver. Receivers wait for
each other only after that lock is released, so that broadcasts and sends that overlap cannot block each other.

`rl_core.messages.tensors` lists the messages, `tensor_exchange` sends and receives them.
"""

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import InfrastructureError
from rl_core.messages.members import Incarnation
from rl_core.messages.tensors import DeviceMemory, TensorHeader, TensorLocation, TensorTarget, TransportUnavailable
from rl_core.messages.weights import GroupPlan
from rl_core.plan.groups import kinds_of_environment
from rl_core.transports.sockets import split_address
from rl_core.transports.tokens import host_token
from rl_core.workers.message_channel import LOOK_SECONDS, MessageChannel, Receipt, Watch, in_thread
from rl_core.workers.receive_cycles import MESSAGE
from rl_core.workers.tensor_exchange import TENSOR, TensorExchange
from rl_core.workers.tensor_memory import accelerator_of, after_queued, check_tensor, flat_bytes, row_major

if TYPE_CHECKING:
    import torch

    from rl_core.collective.pair import PairGroups

logger = logging.getLogger(__name__)

IPC = "ipc"
HOST = "host"
FORM_SECONDS = 30.0
"""Seconds for forming a process group. After them the tensor goes through host memory."""
STUCK_SECONDS = 1.0
"""Seconds after its timeout at which the formation of a group is abandoned. NCCL may block in it."""


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
        """Number of tensors on accelerators that were sent, by transport: ipc, nccl or host. A broadcast counts once for each receiver."""
        self._lock = threading.Lock()
        """Guards the three fields above."""

    def header(self, tensor: Any, *, receivers: int = 1) -> TensorHeader | None:
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
            receivers=receivers,
        )

    def target(self, tensor: Any) -> Target:
        """Return the target of a receive into `tensor`."""
        return Target(tensor, self._accelerator_of(tensor), after_queued(tensor))

    def send(
        self, tensor: Any, header: TensorHeader, receivers: Sequence[str], *, seconds: float, waited_for: bool
    ) -> "Future[None]":
        """Start to send a tensor, and store its header for the receivers. The future is done when all receivers have the tensor.

        Where it goes through host memory, it need only be stored. `waited_for` says that the caller waits for the future. The future raises
        WorkerLost, Deadlock, DeadlineExceeded, and the errors of receivers. All receivers raise the error as well.
        """
        ready, description = after_queued(tensor), MESSAGE if waited_for else TENSOR
        exchanges = [
            TensorExchange(self._messages, receiver, header.transfer, seconds, Watch.present(self._context, receiver))
            for receiver in receivers
        ]
        stored = self._messages.put_copies(header, receivers, timeout=seconds)
        self._messages.note_send(stored)

        def deliver() -> None:
            sends: list[Future[bool]] = []
            try:
                stored.result()
                ready()
                source = row_major(tensor)
                for exchange in exchanges:
                    send = functools.partial(self._send_directly, exchange, source, header, description)
                    sends.append(in_thread(send, "rljob-send-tensor"))
                for done_send in wait(sends, return_when=FIRST_EXCEPTION).done:
                    done_send.result()
                by_host = [exchange for exchange, send in zip(exchanges, sends, strict=True) if not send.result()]
                if by_host:
                    for exchange in by_host:
                        exchange.check()
                    names, remaining = [exchange.peer for exchange in by_host], exchanges[0].seconds_left
                    self._messages.put_copies(source.cpu(), names, transfer=header.transfer, timeout=remaining).result()
                    self._count(HOST, len(by_host))
                for exchange in exchanges if header.receivers > 1 else ():
                    if exchange not in by_host:
                        exchange.post(None)
            except BaseException as error:
                for exchange in exchanges:
                    exchange.stop(error)
                wait(sends)
                for exchange in exchanges:
                    exchange.report(error)
                raise

        return in_thread(deliver, "rljob-send-tensor")

    def receive(self, header: TensorHeader, sender: str, seconds: float, target: Target | None = None) -> Any:
        """Receive the tensor of `header` into `target` and return None once all receivers have it, or return it in host memory.

        It is returned for a target in host memory, for None, and when the ends have no other transport. Raises ValueError for a target of
        another shape or type, WorkerLost, DeadlineExceeded, and the error of the sender, which may be that of another receiver. All errors
        are raised at the sender as well.
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
                reason = self._fill(exchange, message, target.tensor.detach())
                exchange.post(TransportUnavailable(reason=reason) if reason else None)
                if not reason and header.receivers == 1:
                    return None

    def close(self) -> None:
        """Leave all process groups."""
        with self._lock:
            groups, self._pairs = self._pairs, None
        if groups is not None:
            groups.close()

    # --- the sender's end ------------------------------------------------------------------------------------------

    def _send_directly(
        self, exchange: TensorExchange, source: "torch.Tensor", header: TensorHeader, description: str
    ) -> bool:
        """Send `source`, in row-major order, unless it must go through host memory. Return whether the receiver has it.

        `description` is reported as that for which this worker waits until the receiver has begun to receive.
        """
        target = exchange.receive_target(description)
        transport = self._transport(header.location, target.location, exchange.peer)
        if transport == HOST:
            return False
        route = self._route(exchange.peer)
        while not route.lock.acquire(timeout=LOOK_SECONDS):
            exchange.check()
        try:
            if transport in route.unavailable:
                return False
            by_group = transport == self._backend
            reason = self._send_by_group(exchange, source, target) if by_group else _send_by_ipc(exchange, source)
            if reason:
                logger.warning("tensors from %s to %s go through host memory: %s", self._name, exchange.peer, reason)
                route.unavailable.add(transport)
                return False
            self._count(transport)
            return True
        finally:
            route.lock.release()

    def _count(self, transport: str, receivers: int = 1) -> None:
        with self._lock:
            self.sent[transport] += receivers

    def _transport(self, source: TensorLocation, destination: TensorLocation, receiver: str) -> str:
        """Return the transport between two locations. If it turns out to be unavailable, host memory takes its place."""
        if not destination.device or not self._trusts(receiver):
            return HOST
        if source.device == destination.device:  # a group cannot use an accelerator twice
            return IPC if source.host_token == destination.host_token else HOST
        return self._backend

    def _trusts(self, peer: str) -> bool:
        """Return whether this process may share memory or form a process group with `peer`.

        In a job, the worker groups of both must hold the model. Other groups run code that must not reach the trainer, and network rules
        separate them from it.
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

    def _send_by_group(self, exchange: TensorExchange, source: "torch.Tensor", target: TensorTarget) -> str:
        """Send `source` over a process group. Return "" when the receiver has it, or why the group could not be formed."""
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
                sending = self._broadcast(exchange, plan, flat_bytes(source), reply)
            except NotFormed as error:
                groups.abort(plan, str(error))  # Ends the formation of the group at the receiver.
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

    def _fill(self, exchange: TensorExchange, message: GroupPlan | DeviceMemory, tensor: "torch.Tensor") -> str:
        """Receive into `tensor`. Return "" when it has arrived, or why this process cannot receive by this transport."""
        if not self._trusts(exchange.peer):
            raise InfrastructureError(
                f"{exchange.peer} must send through host memory to {self._name}; one of the groups holds no model"
            )
        if isinstance(message, GroupPlan):
            return self._receive_by_group(exchange, message, tensor)
        return _receive_by_ipc(message, tensor)

    def _receive_by_group(self, exchange: TensorExchange, plan: GroupPlan, tensor: "torch.Tensor") -> str:
        """Receive into `tensor` over a process group. Return "" when it has arrived, or why the group could not be formed.

        The group writes to a buffer of its own, because it may keep writing after an error. In that case `tensor` is unchanged.
        """
        import torch

        from rl_core.collective.pair import NotFormed

        if plan.members != (exchange.peer, self._name):
            raise InfrastructureError(f"{self._name} must not form a process group of {', '.join(plan.members)}")
        groups = self._groups
        with exchange.reporting_errors(lambda error: groups.abort(plan, str(error))):
            try:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._broadcast(exchange, plan, flat_bytes(memory))
            except NotFormed as error:
                return str(error)
            except InfrastructureError as error:
                exchange.raise_original(error)
                raise
            tensor.copy_(memory)
            after_queued(tensor)()
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
        remaining = exchange.seconds_left
        transfer = in_thread(lambda: group.broadcast(data, timeout=remaining), "rljob-broadcast-tensor")
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


def _send_by_ipc(exchange: TensorExchange, source: "torch.Tensor") -> str:
    """Let the receiver copy `source` from the memory of this process. Return "" when it has, or why it could not map the memory."""
    import torch

    from rl_core.weights.device_buffer import handle_of, release

    # Cloned: the storage of the caller's tensor must not be moved to shared memory.
    memory = source if source.is_cuda else source.clone()
    try:
        handle = handle_of(memory.untyped_storage())
    except RuntimeError as error:  # torch raises nothing narrower
        return str(error).partition("\n")[0]
    exchange.post(DeviceMemory(handle=handle, start=memory.storage_offset() * memory.itemsize))
    answer = exchange.receive(TENSOR)
    if isinstance(answer, TransportUnavailable):
        release(memory.untyped_storage(), handle)
    del memory
    if source.is_cuda:
        torch.cuda.ipc_collect()
    return answer.reason if isinstance(answer, TransportUnavailable) else ""


def _receive_by_ipc(memory: DeviceMemory, tensor: "torch.Tensor") -> str:
    """Copy the memory of the sender to `tensor`. Return "" when it has arrived, or why the memory could not be mapped."""
    from rl_core.weights.device_buffer import mapped

    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(mapped(memory.handle, str(tensor.device)))
        except RuntimeError as error:  # torch raises nothing narrower
            return str(error).partition("\n")[0]
        tensor.copy_(source[memory.start : memory.start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return ""
