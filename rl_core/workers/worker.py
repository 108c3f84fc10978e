"""The base class of every worker, from which actors, rollouts and environment workers derive.

It gives a worker its identity, the other members of the job, and ways to report to the runner. The generic worker process (`python -m
rl_core.workers.host`) constructs the subclass and serves its public methods. Sync methods run in one thread, one at a time. Async methods
run on the worker's event loop, where nothing may block.

The epoch of a job counts how often its gang (the runner, the channel server and the actors) was started again, from 0. Every message
carries the epoch of its sender. Messages of an older epoch are refused with EpochFenced, so that a process that belongs to the gang before
the restart cannot change anything.
"""

import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_core.api.identity import Identity, WorkerAddress, WorkerInfo
from rl_core.messages.members import MemberView, WaitCause
from rl_core.transports.rpc import RpcClient
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.transports.sockets import split_address
from rl_core.workers.context import WorkerContext
from rl_core.workers.group import WorkerGroup
from rl_core.workers.mail import Mail
from rl_core.workers.message_channel import Receipt
from rl_core.workers.timers import PROCESS, worker_timer

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.channel import AsyncHandle, Channel
    from rl_core.transports.curve import KeyRing

__all__ = ["Worker", "worker_timer"]


class Worker:
    """The code of one worker process.

    Its properties and helpers can be used in the `__init__` of a subclass, also without `super().__init__()`. A subclass may define these
    hooks, sync or async:

    - `on_new_epoch(epoch)` drops the work, leases and buffers of the old epoch.
    - `drain()` finishes the work in progress or returns it, before the process ends.
    - `close()` releases what the object holds.
    """

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Methods that members of other groups may call, by the group of the caller, in a job. The runner may call all methods, and so may the
    workers of a script."""
    _context: WorkerContext
    _mail_of_epoch: Mail | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give the object the context of a worker outside a job, before the `__init__` of the subclass runs."""
        worker = super().__new__(cls)
        worker._context = WorkerContext()
        worker._mail_of_epoch = None
        return worker

    @classmethod
    def create_in_context(cls, context: WorkerContext, /, *args: Any, **kwargs: Any) -> Self:
        """Construct `cls(*args, **kwargs)` as part of the process of `context`, which `__init__` can already use."""
        worker = cls.__new__(cls, *args, **kwargs)
        worker._context = context
        cls.__init__(worker, *args, **kwargs)
        return worker

    @classmethod
    def remote_methods(cls) -> set[str]:
        """Return the names of the public methods that `cls` and its bases below Worker define.

        The runner may call all of them. Members of other groups may call those in `peer_methods`.
        """
        defined = [vars(kind) for kind in cls.__mro__ if kind not in (Worker, object)]
        return {name for names in defined for name, value in names.items() if name[0] != "_" and _is_method(value)}

    # --- who am I --------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Identity of this process as of its start. Its `epoch` may be out of date; use the property `epoch`."""
        return self._context.identity

    @property
    def rank(self) -> int:
        """Rank of this process in its group, from 0."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Planned number of processes of the group. An elastic group may have more or fewer members at a time."""
        return self.identity.world_size

    @property
    def group_name(self) -> str:
        """Name of the group, for example `actor` or `rollout`."""
        return self.identity.group

    @property
    def epoch(self) -> int:
        """Present epoch of the job: how often its gang was restarted. See the module."""
        return self._context.epoch

    @property
    def device(self) -> str:
        """Torch device of this process: `cuda:N`, where N counts the devices that the process sees, or `cpu`."""
        placement = self._context.placement
        return f"cuda:{placement.device_index}" if placement.visible_accelerators else "cpu"

    @property
    def worker_address(self) -> WorkerAddress:
        """Name of this process in messages and logs: group name and rank."""
        return WorkerAddress(self.group_name, (self.rank,))

    @property
    def worker_info(self) -> WorkerInfo:
        """Description of this process for others: rank, accelerators, and the host and port of its RPC server."""
        host, port = split_address(self._context.address) if self._context.address else ("127.0.0.1", 0)
        placement = self._context.placement
        return WorkerInfo(
            address=self.worker_address,
            rank=self.rank,
            group_world_size=self.world_size,
            cluster_node_rank=placement.cluster_node_rank,
            accelerator_type=placement.accelerator_type,
            accelerator_rank=placement.local_accelerator_rank,
            available_accelerators=tuple(placement.visible_accelerators),
            device_uuids=self._context.device_uuids,
            node_ip=host,
            node_port=port,
            hardware_infos=tuple(map(str, placement.local_hardware_ranks)),
        )

    @property
    def address(self) -> str:
        """Address of this process's RPC server, `tcp://host:port`. Empty for a worker outside a job."""
        return self._context.address

    @property
    def job(self) -> "RLJob | None":
        """The job that the runner sent at registration. None for a worker outside a job."""
        return self._context.job

    @property
    def files(self) -> dict[str, bytes]:
        """Model configuration and tokenizer files by name, as the runner sent them at registration."""
        return self._context.files

    @property
    def keys(self) -> "KeyRing | None":
        """CURVE keys of this group. None in a job without keys, which uses the loopback interface only."""
        return self._context.keys

    # --- others ----------------------------------------------------------------------------------------------------

    def members(self, group: str | None = None) -> list[MemberView]:
        """Return the members of `group` that are neither lost nor drained, as of the last heartbeat.

        `group` None returns the members of all groups that this worker may call. A heartbeat is sent every `deadlines.heartbeat` seconds.
        """
        return self._context.members(group)

    @property
    def num_serving(self) -> int:
        """Number of members of this worker's own group in the state `serving`, as of the last heartbeat."""
        return self._context.num_serving

    async def view_changed(self) -> None:
        """Wait until the result of `members` changes.

        This is the case when a member that this worker may call joins, becomes able or unable to take calls, or is gone. The wait has no
        timeout; the caller sets one.
        """
        await self._context.view_changed()

    async def hub_call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the runner's hub and return its result.

        `timeout` is in seconds; None means `deadlines.rpc`. Raises InfrastructureError outside a job, DeadlineExceeded after the timeout,
        and the errors of the method.
        """
        return await self._context.hub_client().call(method, *args, timeout=timeout or self._rpc_deadline)

    def peer(self, address: str, service: str | None = None) -> RpcClient:
        """Return the RPC client of the process at `address`. Clients are cached by address.

        `service` is the group of that process. It may be None if `members` lists the process.
        """
        return self._context.peer(address, service)

    def connect_channel(self, name: str, timeout: float | None = None) -> "Channel":
        """Return the channel `name`, which the runner has created or will create.

        `timeout` is the number of seconds to wait for it; None uses the default of `Channel.connect`.
        """
        from rl_core.channel import Channel

        return Channel.connect(name, worker=self, timeout=timeout)

    def create_channel(self, name: str, **options: Any) -> "Channel":
        """Create the channel `name` and return it. `options` are those of `Channel.create`."""
        from rl_core.channel import Channel

        return Channel.create(name, **options)

    # --- messages by name ------------------------------------------------------------------------------------------

    def send(
        self, obj: Any, dst_group: str, dst_rank: int, *, async_op: bool = False, timeout: float | None = None
    ) -> "AsyncHandle[None] | None":
        """Send `obj` to a worker, which gets it with `recv(group_name, rank)` of this worker.

        Returns when the message is stored for the receiver, or with `async_op` a handle at once; arrays of `obj` must not be changed until
        it is done. Messages of one worker to another arrive in the order of the sends. At most 64 of them wait to be received, then a send
        waits. `timeout` is in seconds (None: 600). Raises WorkerLost when the receiver is gone, DeadlineExceeded, TypeError for an object that
        cannot be serialized, and ValueError for a rank that the group does not have and for a group that does not exist. In a script a send
        without `async_op` waits up to 30 seconds for a group that still starts; one with `async_op` does not check the name of the group.
        """
        handle = self._mail.send(obj, f"{dst_group}:{dst_rank}", timeout=timeout, may_block=not async_op)
        return handle if async_op else handle.wait()

    def recv(self, src_group: str, src_rank: int, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return the next message that a worker has sent to this one, or with `async_op` a `Receipt` at once, to wait for.

        `timeout` is in seconds (None: 600). Raises WorkerLost when the sender is gone and has left no message, Deadlock when this worker
        and others have waited for each other in a cycle for 5 seconds and none of them is sending, DeadlineExceeded, and ValueError for a
        rank that the group does not have.
        """
        receipt = self._mail.receive(f"{src_group}:{src_rank}", timeout=timeout)
        return receipt if async_op else receipt.wait()

    def send_tensor(
        self, tensor: Any, dst_group: str, dst_rank: int, *, async_op: bool = False, timeout: float | None = None
    ) -> "AsyncHandle[None] | None":
        """Send a tensor or array as `send` does.

        If the tensor is on an accelerator, this returns when the receiver has the tensor, and raises the errors of `recv` and those of the
        receiver too. The elements go directly to a tensor on an accelerator for which the receiver calls `recv_tensor`: through memory that
        both processes map if they use the same accelerator, and by NCCL otherwise. Any other receiver gets them through host memory.
        """
        handle = self._mail.send_tensor(tensor, f"{dst_group}:{dst_rank}", timeout=timeout, may_block=not async_op)
        return handle if async_op else handle.wait()

    def recv_tensor(
        self, tensor: Any, src_group: str, src_rank: int, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive a tensor or array into `tensor`, on any device, and return it, or with `async_op` a `Receipt` at once, to wait for.

        Raises ValueError when the message has another shape or type; the message is dropped then. Other errors are those of `recv`. After an
        error the elements of `tensor` on an accelerator are undefined; nothing is written to them any more. The receive by NCCL takes memory
        for another such tensor while it lasts.
        """
        receipt = self._mail.receive_tensor(tensor, f"{src_group}:{src_rank}", timeout=timeout, waited_for=not async_op)
        return receipt if async_op else receipt.wait()

    def broadcast(
        self,
        obj: Any = None,
        *,
        groups: Sequence[str],
        src: tuple[str, int],
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return the `obj` of the worker `src`, a pair of group and rank, on each member of `groups`.

        With `async_op`, return at once a handle with `wait` and `async_wait`, as `send` and `recv` do.

        All members of the groups and `src` must call it; `src` need not be a member of the groups. The argument `obj` of all others is
        ignored, unless it is a tensor on an accelerator: then the object of `src`, a tensor of equal shape and type, is received into it. A
        tensor on an accelerator of `src` goes to each member as by `send_tensor`, and all wait until all have it.

        `timeout` is in seconds (None: 600). Raises the errors of `send` and `recv`, and ValueError for a group that has no members. If `src`
        cannot send, because a member is gone or `obj` cannot be serialized, all present members raise this error. If a member fails to
        receive a tensor on an accelerator of `src`, all raise its error. After an error the elements of a tensor that was to be received into
        are undefined.
        """
        source = f"{src[0]}:{src[1]}"
        if not async_op:
            refuse_on_event_loop("Worker.broadcast")
        handle: Receipt | AsyncHandle[Any]
        if self.identity.name == source:
            handle = self._mail.broadcast(obj, groups, timeout=timeout, may_block=not async_op)
        else:
            handle = self._mail.receive_broadcast(obj, source, timeout=timeout, waited_for=not async_op)
        return handle if async_op else handle.wait()

    def send_rows(self, batch: Any, dst_group: str, *, timeout: float | None = None) -> None:
        """Send this worker's rows of a batch to the workers of another group, which get them with `recv_rows`.

        The batch consists of the rows of all workers of this group in the order of ranks. Each of them calls this with the same number of
        rows. Each worker of `dst_group` gets the same number of consecutive rows, so the sizes of the groups may differ. `batch` is a tensor,
        an array, a list of rows, or a dictionary of these. `timeout` is in seconds (None: 600). Raises the errors of `send`, and ValueError
        for rows that cannot be divided equally.
        """
        from rl_core.collective.routing import get_dst_ranks, row_count, split_batch

        total = (row_count(batch) or 0) * self.world_size
        route = get_dst_ranks(total, self.world_size, self._mail.size_of(dst_group), self.rank)
        parts = split_batch(batch, [rows for _, rows in route])
        for (rank, _), part in zip(route, parts, strict=True):
            self.send([total, part], dst_group, rank, timeout=timeout)

    def recv_rows(self, src_group: str, *, timeout: float | None = None) -> Any:
        """Return this worker's rows of a batch that the workers of `src_group` have sent with `send_rows`.

        `timeout` is in seconds for each sender (None: 600). Raises the errors of `recv`, and ValueError when the senders had different
        numbers of rows.
        """
        from rl_core.collective.routing import get_src_ranks, merge_batches

        sources = self._mail.size_of(src_group)
        ranks = [rank for rank, _ in get_src_ranks(sources * self.world_size, sources, self.world_size, self.rank)]
        totals, parts = zip(*(self.recv(src_group, rank, timeout=timeout) for rank in ranks), strict=True)
        if len(set(totals)) > 1:
            raise ValueError(
                f"all ranks of {src_group} must send the same number of rows to {self.group_name}, "
                f"got {dict(zip(ranks, [total // sources for total in totals], strict=True))} by rank"
            )
        return merge_batches(parts)

    def leave_process_groups(self) -> None:
        """Leave the process groups in which tensors were sent. The process calls this before it ends; the next tensor forms them again."""
        if self._mail_of_epoch is not None:
            self._mail_of_epoch.close()

    @property
    def _mail(self) -> Mail:
        mail = self._mail_of_epoch
        if mail is None or mail.epoch != self.epoch:
            if mail is not None:
                mail.close()
            mail = self._mail_of_epoch = Mail(self._context)
        return mail

    # --- ports -----------------------------------------------------------------------------------------------------

    def acquire_free_port(self) -> int:
        """Return a TCP port that is free at the moment. It is not reserved, so another process may take it first."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    # --- reporting -------------------------------------------------------------------------------------------------

    def record_progress(self, kind: str, n: float = 1) -> None:
        """Add `n` to the progress counter `kind`, for example tokens, records, micro-batches or environment steps.

        The runner declares a run stalled when no counter of any worker has moved for some time.
        """
        self._context.record_progress(kind, n)

    def record_metric(self, name: str, value: float) -> None:
        """Set the gauge `name`. Each heartbeat sends its latest value to the runner."""
        self._context.record_metric(name, value)

    def report_metrics(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Register the function `read`, whose gauges are sent to the runner with each heartbeat.

        `read` is called on any thread and must return quickly. It replaces a function that was registered before.
        """
        self._context.report_metrics(read)

    def waiting(
        self, what: str | Callable[[], str], on: str, cause: WaitCause | None = None
    ) -> AbstractContextManager[None]:
        """Declare that this worker waits for `what` on `on` while the `with` block runs.

        A function as `what` is called for each heartbeat, on any thread, and must return quickly.

        `on` names a member, a group or a channel. When a run stalls, the runner follows these declarations from one member to the next, and
        reports the last one as the reason. `cause` is the failure reason that it then reports; None means a reason that names the group `on`.
        """
        return self._context.waiting(what, on, cause)

    def set_state(self, state: str) -> None:
        """Report a state to the hub at once. `state` is one of ready, updating, serving, draining."""
        self._context.set_state(state)

    def set_policy_version(self, version: int | None, digest: str | None = None, proof: str = "") -> None:
        """Report to the hub at once which policy weights this worker holds.

        `version` None means that it holds none. `digest` is the content digest of the weights, and `proof` says how they were verified
        after loading.
        """
        self._context.set_policy_version(version, digest, proof)

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a method so that its seconds are added to the timer `tag`. None uses the name of the method."""
        return worker_timer(tag)

    def worker_timer(self, tag: str | None = None) -> worker_timer:
        """Return a context manager that adds the seconds of its block to the timer `tag`. None uses the caller's name."""
        return worker_timer(tag or sys._getframe(1).f_code.co_name)

    def pop_execution_times(self) -> dict[str, float]:
        """Return the seconds by timer tag since the last call, and reset the timers."""
        return PROCESS.pop()

    def log_debug(self, message: str, *args: Any) -> None:
        """Log `message % args` at level DEBUG with the logger of the subclass's module."""
        self._logger.debug(message, *args)

    def log_info(self, message: str, *args: Any) -> None:
        """Log `message % args` at level INFO with the logger of the subclass's module."""
        self._logger.info(message, *args)

    def log_warning(self, message: str, *args: Any) -> None:
        """Log `message % args` at level WARNING with the logger of the subclass's module."""
        self._logger.warning(message, *args)

    def log_error(self, message: str, *args: Any) -> None:
        """Log `message % args` at level ERROR with the logger of the subclass's module."""
        self._logger.error(message, *args)

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__module__)

    @property
    def _rpc_deadline(self) -> float:
        return self.job.spec.runtime.deadlines.rpc if self.job is not None else 60.0

    # --- groups ----------------------------------------------------------------------------------------------------

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Return a group of this class for the runner to use.

        `WorkerGroup.launch` constructs the class with these arguments in each process of a group.
        """
        return WorkerGroup(cls, args, kwargs)


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, classmethod)
