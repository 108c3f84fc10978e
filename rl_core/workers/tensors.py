"""Tensors on accelerators between two workers: `Worker.send_tensor` and `recv_tensor`.

The sender stores a header in the place of a message, so that tensors and other messages arrive in the order in which they were sent. The
receiver answers where it wants the tensor, and the sender chooses the way by where both ends are:

- on the same accelerator: the receiver maps the memory of the sender (CUDA IPC) and copies it;
- on two accelerators: a process group of the two (NCCL), which is kept and formed again after an error or a loss;
- otherwise, and if the receiver cannot map the memory or the group cannot be formed: through host memory, as other messages.

`rl_core.messages.tensors` lists the messages. An error that ends a transfer at one end is raised at the other end as well.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import DeadlineExceeded, Deadlock, InfrastructureError, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle
from rl_core.channel.handle import detach
from rl_core.messages.members import Incarnation
from rl_core.messages.rpc import PackedError
from rl_core.messages.tensors import DeviceMemory, TensorHeader, TensorLocation, TensorTarget, WayUnavailable
from rl_core.messages.weights import GroupPlan
from rl_core.plan.groups import kinds_of_environment
from rl_core.transports.rpc_wire import pack_error, rebuild_error
from rl_core.transports.sockets import split_address
from rl_core.transports.tokens import host_token
from rl_core.workers.message_channel import LOOK_SECONDS, MessageChannel, Receipt, Watch, in_thread
from rl_core.workers.receive_cycles import MESSAGE

if TYPE_CHECKING:
    import torch

    from rl_core.collective.pair import PairGroups

logger = logging.getLogger(__name__)

TENSOR = "a tensor"
"""What a worker waits for once the header has arrived, and in an asynchronous send."""
FORM_SECONDS = 30.0
"""Seconds for forming a process group. After them the tensor goes through host memory."""
ORIGINAL_SECONDS = 5.0
"""Seconds that an end whose group has failed waits for the error of the other end, which may be the reason."""


def accelerator_of(tensor: Any) -> str:
    """Return the UUID of the accelerator of a dense torch tensor; "" for anything else."""
    if not getattr(tensor, "is_cuda", False):
        return ""
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if plain else ""


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that is received into."""

    tensor: Any
    device: str
    """UUID of its accelerator; "" for host memory."""
    ready: Callable[[], None]
    """Waits for the operations on the tensor that were queued when the receive was called."""


@dataclass(slots=True)
class _Route:
    """What this process knows of the ways to one process of a receiver."""

    process: Incarnation | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the transfer that uses the group."""
    unavailable: set[str] = field(default_factory=set)
    """Ways that have turned out not to work."""


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
        """Number of tensors on accelerators that were sent, by way: ipc, nccl or host."""
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
            place=TensorLocation(device=device, host_token=host_token()),
            incarnation=self._context.identity.incarnation,
        )

    def target(self, tensor: Any) -> Target:
        """Return the target of a receive into `tensor`."""
        return Target(tensor, self._accelerator_of(tensor), _queued(tensor))

    def send(
        self, tensor: Any, header: TensorHeader, receiver: str, *, seconds: float, waited_for: bool
    ) -> AsyncHandle[None]:
        """Start to send a tensor, whose header is stored for the receiver. The handle is done when the receiver has the tensor.

        `waited_for` says that the caller waits for the handle. The handle raises WorkerLost, Deadlock, DeadlineExceeded, and the error of
        the receiver.
        """
        watch, ready = Watch.present(self._context, receiver), _queued(tensor)
        exchange = _Exchange(self._messages, receiver, header.transfer, seconds, watch)
        self._messages.note_send(self._messages.put(header, receiver, timeout=seconds))

        def deliver() -> None:
            with exchange.reporting_errors():
                target = exchange.take_answer(MESSAGE if waited_for else TENSOR)
                ready()
                self._deliver(exchange, tensor.detach(), header, target)

        return AsyncHandle(in_thread(deliver, "rljob-send-tensor"), lambda none: none, detach)

    def receive(self, header: TensorHeader, sender: str, seconds: float, target: Target | None = None) -> Any:
        """Receive the tensor of `header` into `target` and return None, or return it in host memory.

        It is returned for a target in host memory, for None, and when the ends have no other way. Raises ValueError for a target of another
        shape or type, WorkerLost, DeadlineExceeded, and the error of the sender. All errors are raised at the sender as well.
        """
        watch = Watch(self._context, sender, header.incarnation)
        exchange = _Exchange(self._messages, sender, header.transfer, seconds, watch)
        with exchange.reporting_errors():
            if target is not None:
                check_tensor(target.tensor, header, sender)
            place = TensorLocation(device="" if target is None else target.device, host_token=host_token())
            held = self._groups.held(sender) if place.device else ""
            exchange.post(TensorTarget(place=place, group=held))
            while True:
                message = exchange.take(TENSOR)
                if target is None or not place.device or not isinstance(message, GroupPlan | DeviceMemory):
                    return message
                target.ready()
                with _row_major(target.tensor) as data:
                    reason = self._fill(exchange, message, data)
                exchange.post(WayUnavailable(reason=reason) if reason else None)
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
        self, exchange: "_Exchange", tensor: "torch.Tensor", header: TensorHeader, target: TensorTarget
    ) -> None:
        route = self._route(exchange.peer)
        if not route.lock.acquire(timeout=exchange.left):
            raise DeadlineExceeded(
                f"{self._name} could not send to {exchange.peer} in time: earlier tensors are on their way"
            )
        try:
            for way in self._ways(header.place, target.place, exchange.peer):
                if way in route.unavailable:
                    continue
                reason = self._by_group(exchange, tensor, target) if way == self._backend else _lend(exchange, tensor)
                if not reason:
                    self._count(way)
                    return
                logger.warning("tensors from %s to %s go through host memory: %s", self._name, exchange.peer, reason)
                route.unavailable.add(way)
            exchange.post_and_wait(tensor.cpu())
            self._count("host")
        finally:
            route.lock.release()

    def _count(self, way: str) -> None:
        with self._lock:
            self.sent[way] += 1

    def _ways(self, own: TensorLocation, other: TensorLocation, receiver: str) -> list[str]:
        """Return the ways besides host memory."""
        if not other.device or not self._trusts(receiver):
            return []
        if own.device == other.device:  # a group cannot use an accelerator twice
            return ["ipc"] if own.host_token == other.host_token else []
        return [self._backend]

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

    def _by_group(self, exchange: "_Exchange", tensor: "torch.Tensor", target: TensorTarget) -> str:
        """Send the tensor over a process group. Return "" when the receiver has it, or why the group could not be formed."""
        from rl_core.collective.pair import NotFormed

        groups = self._groups
        plan = groups.plan(exchange.peer, target.group)
        data = _bytes_of(tensor.contiguous())
        exchange.post(plan)
        reply = exchange.receipt(TENSOR)
        sending = self._start(exchange, plan, data)
        try:
            while not (sending.done() or reply.done()):
                reply.check()
                wait([sending], LOOK_SECONDS)
            error = sending.exception() if sending.done() else None
            if error is None:
                answer = exchange.opened(reply.wait())
                if isinstance(answer, WayUnavailable):
                    groups.abort(plan, answer.reason)
                    return answer.reason
                sending.result(exchange.left)
                return ""
            if not isinstance(error, NotFormed):
                reply.cancel()
                raise exchange.original(error)
            groups.abort(plan, str(error))  # ends the formation at the receiver
            answer = exchange.opened(reply.wait())
            return answer.reason if isinstance(answer, WayUnavailable) else str(error)
        except BaseException as error:
            exchange.report(error)  # before the other end sees that the group has ended
            groups.abort(plan, str(error))
            raise

    # --- the receiver's end ----------------------------------------------------------------------------------------

    def _fill(self, exchange: "_Exchange", message: GroupPlan | DeviceMemory, data: "torch.Tensor") -> str:
        """Receive `data`. Return "" when it has arrived, or why this process cannot receive in this way."""
        if not self._trusts(exchange.peer):
            raise InfrastructureError(
                f"{exchange.peer} must send through host memory to {self._name}; one of the groups holds no model"
            )
        if isinstance(message, GroupPlan):
            return self._join(exchange, message, data)
        return _copy(message, data)

    def _join(self, exchange: "_Exchange", plan: GroupPlan, data: "torch.Tensor") -> str:
        """Receive `data` over a process group. Return "" when it has arrived, or why the group could not be formed."""
        from rl_core.collective.pair import NotFormed

        if plan.members != (exchange.peer, self._name):
            raise InfrastructureError(f"{self._name} must not form a process group of {', '.join(plan.members)}")
        receiving = self._start(exchange, plan, data)
        try:
            while not receiving.done():
                exchange.check()
                wait([receiving], LOOK_SECONDS)
            error = receiving.exception()
            if error is None:
                return ""
            if isinstance(error, NotFormed):
                return str(error)
            raise exchange.original(error)
        except BaseException as error:
            exchange.report(error)  # before the other end sees that the group has ended
            self._groups.abort(plan, str(error))
            raise

    # --- both ends -------------------------------------------------------------------------------------------------

    def _start(self, exchange: "_Exchange", plan: GroupPlan, data: "torch.Tensor") -> "Future[None]":
        groups, left = self._groups, exchange.left
        return in_thread(
            lambda: groups.transfer(plan, data, form_timeout=min(FORM_SECONDS, left / 2), timeout=left),
            "rljob-tensor-group",
        )

    @property
    def _groups(self) -> "PairGroups":
        from rl_core.collective.pair import PairGroups

        with self._lock:
            if self._pairs is None:
                host = split_address(self._context.address)[0]
                self._pairs = PairGroups(name=self._name, host=host, epoch=self._context.epoch, backend=self._backend)
            return self._pairs


class _Exchange:
    """The messages of one transfer, at one of its ends."""

    def __init__(self, messages: MessageChannel, peer: str, transfer: str, seconds: float, watch: Watch) -> None:
        self.peer = peer
        self._messages, self._transfer, self._watch, self._seconds = messages, transfer, watch, seconds
        self._deadline = time.monotonic() + seconds
        self._has_failed = False
        """Whether one of the ends has sent an error to the other."""

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    def post(self, message: Any) -> AsyncHandle[None]:
        """Start to send `message` to the other end."""
        return self._messages.put(message, self.peer, transfer=self._transfer, timeout=self.left)

    def post_and_wait(self, message: Any) -> None:
        """Send `message` to the other end and return when it is stored."""
        self.post(message).wait()

    def receipt(self, what: str, seconds: float | None = None) -> Receipt:
        """Start to receive a message of the other end. `what` is reported as that for which this worker waits."""
        return Receipt(
            self._messages,
            self.peer,
            self.left if seconds is None else seconds,
            lambda message: message,
            transfer=self._transfer,
            what=what,
            watch=self._watch,
        )

    def take(self, what: str, seconds: float | None = None) -> Any:
        """Return the next message of the other end, or raise the error that it has sent."""
        return self.opened(self.receipt(what, seconds).wait())

    def take_answer(self, what: str) -> TensorTarget:
        """Return the answer to the header of a tensor. `what` is reported as that for which this worker waits."""
        try:
            answer: TensorTarget = self.take(what)
        except Deadlock:
            raise
        except DeadlineExceeded as error:
            if self._has_failed:
                raise
            raise DeadlineExceeded(
                f"{self.peer} must receive {TENSOR} of {self._messages.name} within {self._seconds:g} s, it has not begun to"
            ) from error
        return answer

    def opened(self, message: Any) -> Any:
        """Return a message of the other end, or raise the error that it is."""
        if not isinstance(message, PackedError):
            return message
        self._has_failed = True
        self._messages.take_back(self.peer, self._transfer)  # it receives no more
        if message.type == ValueError.__name__:
            raise ValueError(message.message)
        raise rebuild_error(message, method="a transfer of a tensor", peer=self.peer)

    def check(self) -> None:
        """Raise WorkerLost if the other end is gone, DeadlineExceeded after the deadline."""
        if self._watch.lost:
            raise WorkerLost(f"{self.peer} is gone; {self._messages.name} waited for {TENSOR} of it")
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(
                f"{self._messages.name} must receive {TENSOR} of {self.peer} within {self._seconds:g} s, it is on its way"
            )

    def original(self, error: BaseException) -> BaseException:
        """Return the error of the other end if it sends one within some moments, WorkerLost if it is gone, and `error` otherwise."""
        if not isinstance(error, InfrastructureError):
            return error
        self._messages.context.wait_view_changed(0.0)
        try:
            self.take(TENSOR, ORIGINAL_SECONDS)
        except (RLJobError, ValueError) as other:
            return other if self._has_failed or isinstance(other, WorkerLost) else error
        return error

    def report(self, error: BaseException) -> None:
        """Send `error` to the other end, unless one of the ends has sent an error before.

        If the other end is gone, the hub deletes the error with the other messages for it, but a replacement that gets the header needs it.
        """
        if self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(RLJobError):
            self._messages.put(pack_error(error), self.peer, transfer=self._transfer, timeout=FORM_SECONDS)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Send an error of the block to the other end."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise


def check_tensor(target: Any, found: Any, sender: str) -> None:
    """Raise ValueError unless `found` is a tensor or array, or the header of one, of the shape and dtype of `target`."""
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape is None or tuple(shape) != tuple(target.shape) or str(dtype) != str(target.dtype):
        got = f"{tuple(shape)} of {dtype}" if shape is not None else f"an object of type {type(found).__name__}"
        raise ValueError(
            f"the message of {sender} must be a tensor of shape {tuple(target.shape)} and type {target.dtype}, got {got}; "
            "use recv for messages of another kind"
        )


def _lend(exchange: _Exchange, tensor: "torch.Tensor") -> str:
    """Let the receiver copy the tensor from the memory of this process. Return "" when it has, or why it could not map the memory."""
    import torch

    from rl_core.weights.device_buffer import handle_of

    memory = tensor.contiguous() if tensor.is_cuda else tensor.clone(memory_format=torch.contiguous_format)
    try:
        handle = handle_of(memory.untyped_storage())
    except RuntimeError as error:  # torch raises nothing narrower
        return str(error).partition("\n")[0]
    exchange.post(DeviceMemory(handle=handle, start=memory.storage_offset() * memory.itemsize))
    answer = exchange.take(TENSOR)
    del memory
    if tensor.is_cuda:
        torch.cuda.ipc_collect()
    return answer.reason if isinstance(answer, WayUnavailable) else ""


def _copy(memory: DeviceMemory, data: "torch.Tensor") -> str:
    """Copy `data` from the memory of the sender. Return "" when it has arrived, or why the memory could not be mapped."""
    from rl_core.weights.device_buffer import mapped

    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(mapped(memory.handle, str(data.device)))
        except RuntimeError as error:  # torch raises nothing narrower
            return str(error).partition("\n")[0]
        data.copy_(source[memory.start : memory.start + data.numel()])
    return ""


@contextlib.contextmanager
def _row_major(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """Yield the bytes of `tensor` as uint8 [nbytes] in row-major order. Those of one with another layout are copied to it afterwards."""
    plain = tensor.detach()
    dense = plain if plain.is_contiguous() else plain.new_empty(plain.shape)
    yield _bytes_of(dense)
    if dense is not plain:
        plain.copy_(dense)
        _queued(plain)()


def _bytes_of(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a view of a contiguous tensor as uint8 [nbytes]."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _queued(tensor: Any) -> Callable[[], None]:
    """Return a function that waits for the operations on `tensor` that the present thread has queued so far."""
    if not getattr(tensor, "is_cuda", False):
        return lambda: None
    import torch

    wait_for_event: Callable[[], None] = torch.cuda.current_stream(tensor.device).record_event().synchronize
    return wait_for_event
