"""The base class of every worker: its identity, the other members, reports to the runner. Actors, rollouts and envs derive from it.

The generic host (`python -m rl_core.workers.host`) constructs the subclass and serves its public methods. Sync methods run in one thread,
one at a time. Async methods run on the worker's event loop, where nothing may block.
"""

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_core.api.identity import Identity, WorkerAddress, WorkerInfo
from rl_core.messages.members import MemberView, WaitCause
from rl_core.transports.rpc import RpcClient
from rl_core.transports.sockets import split_address
from rl_core.workers.context import WorkerContext
from rl_core.workers.group import WorkerGroup
from rl_core.workers.timers import PROCESS, worker_timer

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.channel import Channel
    from rl_core.transports.curve import KeyRing

__all__ = ["Worker", "worker_timer"]


class Worker:
    """The code of one worker process. Its properties and helpers can be used in the `__init__` of a subclass, without `super().__init__()`.

    Hooks a subclass may define: `on_new_epoch(epoch)` (drop work, leases and buffers of the old epoch), `drain()` (finish
    or return work before the end), `close()`; each sync or async.
    """

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Methods that members of other groups may call, by the group of the caller, in a job with keys. The runner may call all methods."""
    _context: WorkerContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give the object the context of a worker outside a job, before the `__init__` of the subclass runs."""
        worker = super().__new__(cls)
        worker._context = WorkerContext()
        return worker

    @classmethod
    def hosted(cls, context: WorkerContext, /, *args: Any, **kwargs: Any) -> Self:
        """Return the object of `cls(*args, **kwargs)` that lives in `context` from its `__init__` on."""
        worker = cls.__new__(cls, *args, **kwargs)
        worker._context = context
        cls.__init__(worker, *args, **kwargs)
        return worker

    @classmethod
    def remote_methods(cls) -> set[str]:
        """Return the names of the public methods that subclasses of Worker down to `cls` define: groups and peers may call them."""
        defined = [vars(kind) for kind in cls.__mro__ if kind not in (Worker, object)]
        return {name for names in defined for name, value in names.items() if name[0] != "_" and _is_method(value)}

    # --- who am I --------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Identity of this process as started; `epoch` is the present epoch."""
        return self._context.identity

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Planned size of the group. An elastic group may have more or fewer members at a time."""
        return self.identity.world_size

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self.identity.group

    @property
    def epoch(self) -> int:
        """Present epoch of the job."""
        return self._context.epoch

    @property
    def device(self) -> str:
        """`cuda:N`, N among the devices this process sees, or `cpu`."""
        place = self._context.placement
        return f"cuda:{place.device_index}" if place.visible_accelerators else "cpu"

    @property
    def worker_address(self) -> WorkerAddress:
        """Place in the tree of groups."""
        return WorkerAddress(self.group_name, (self.rank,))

    @property
    def worker_info(self) -> WorkerInfo:
        """What the other processes know of this process."""
        host, port = split_address(self._context.address) if self._context.address else ("127.0.0.1", 0)
        place = self._context.placement
        return WorkerInfo(
            address=self.worker_address,
            rank=self.rank,
            group_world_size=self.world_size,
            cluster_node_rank=place.cluster_node_rank,
            accelerator_type=place.accelerator_type,
            accelerator_rank=place.local_accelerator_rank,
            available_accelerators=tuple(place.visible_accelerators),
            device_uuids=self._context.device_uuids,
            node_ip=host,
            node_port=port,
            hardware_infos=tuple(map(str, place.local_hardware_ranks)),
        )

    @property
    def address(self) -> str:
        """Address of this process's RPC server, `tcp://host:port`."""
        return self._context.address

    @property
    def job(self) -> "RLJob | None":
        """The job; None outside one."""
        return self._context.job

    @property
    def files(self) -> dict[str, bytes]:
        """Files the runner handed out at hello by name: model configuration and tokenizer."""
        return self._context.files

    @property
    def keys(self) -> "KeyRing | None":
        """Keys of this group; None in a job without keys, which runs on loopback only."""
        return self._context.keys

    # --- others ----------------------------------------------------------------------------------------------------

    def members(self, group: str | None = None) -> list[MemberView]:
        """Return the living members of `group` (None: of all groups that this worker may call) as of the last heartbeat.

        A heartbeat is sent every `deadlines.heartbeat` seconds.
        """
        return self._context.members(group)

    @property
    def num_serving(self) -> int:
        """Members of this worker's own group that serve the policy, as of the last heartbeat."""
        return self._context.num_serving

    async def view_changed(self) -> None:
        """Wait until a member that this worker may call joins, begins or stops to take calls, or is gone.

        The wait has no bound of its own: the caller sets the deadline.
        """
        await self._context.view_changed()

    async def hub_call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the runner's hub. `timeout` None = `deadlines.rpc`."""
        return await self._context.hub_client().call(method, *args, timeout=timeout or self._rpc_deadline)

    def peer(self, address: str, service: str | None = None) -> RpcClient:
        """Return the cached RPC client of the process at `address`. `service` (its group) is needed for a process that `members` does not list."""
        return self._context.peer(address, service)

    def connect_channel(self, name: str, timeout: float | None = None) -> "Channel":
        """Return the channel `name`, which the runner created."""
        from rl_core.channel import Channel

        return Channel.connect(name, worker=self, timeout=timeout)

    def create_channel(self, name: str, **options: Any) -> "Channel":
        """Create the channel `name`; options as of Channel.create."""
        from rl_core.channel import Channel

        return Channel.create(name, **options)

    def acquire_free_port(self) -> int:
        """Return a TCP port that is free at the time of the call; it is not reserved."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    # --- reporting -------------------------------------------------------------------------------------------------

    def record_progress(self, kind: str, n: float = 1) -> None:
        """Add to a progress counter (tokens, records, micro-steps, buckets, env steps). A run whose counters all stand still is stalled."""
        self._context.record_progress(kind, n)

    def record_metric(self, name: str, value: float) -> None:
        """Set a gauge that is sent to the runner with each heartbeat."""
        self._context.record_metric(name, value)

    def report_metrics(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Send the gauges that `read` returns with each heartbeat. `read` is called on any thread and must return quickly."""
        self._context.report_metrics(read)

    def waiting(self, what: str, on: str, cause: WaitCause | None = None) -> AbstractContextManager[None]:
        """Declare, while the block runs, that this worker waits for `what` on `on` (member, group or channel).

        `cause` becomes the reason of a stall at which the wait ends; None: the reason names the group that is waited for.
        """
        return self._context.waiting(what, on, cause)

    def set_state(self, state: str) -> None:
        """Report a state to the hub at once: ready, updating, serving, draining."""
        self._context.set_state(state)

    def set_policy_version(self, version: int | None, digest: str | None = None, proof: str = "") -> None:
        """Report to the hub at once which weights this worker holds, and by what that is proven; None = none."""
        self._context.set_policy_version(version, digest, proof)

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a method: its seconds are summed under `tag` (None: its name)."""
        return worker_timer(tag)

    def worker_timer(self, tag: str | None = None) -> worker_timer:
        """Sum the seconds of a `with` block under `tag`."""
        return worker_timer(tag or sys._getframe(1).f_code.co_name)

    def pop_execution_times(self) -> dict[str, float]:
        """Return the summed seconds by tag and start again."""
        return PROCESS.pop()

    def log_debug(self, message: str, *args: Any) -> None:
        """Log with the subclass's module as source."""
        self._logger.debug(message, *args)

    def log_info(self, message: str, *args: Any) -> None:
        """Log with the subclass's module as source."""
        self._logger.info(message, *args)

    def log_warning(self, message: str, *args: Any) -> None:
        """Log with the subclass's module as source."""
        self._logger.warning(message, *args)

    def log_error(self, message: str, *args: Any) -> None:
        """Log with the subclass's module as source."""
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
        """Return a group of this class, to be constructed with the arguments in each process of a role by `launch`."""
        return WorkerGroup(cls, args, kwargs)


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, classmethod)
