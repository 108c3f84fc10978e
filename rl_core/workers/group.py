"""A group of workers as one object: `group.method(...)` runs on all ranks and returns a WorkerGroupFuncResult.

    actors = FSDPActor.create_group(spec).launch(cluster, name="actor")     # or WorkerGroup.of("module:Class", spec)
    actors.init_worker().wait()
    actors.execute_on(0).publisher_address().wait()

The pods' supervisors start the worker processes. `launch` constructs the class in them. There are two kinds of groups: the members of a
fixed group, such as the actors, are constructed together when all have joined (they form a gang). The members of an elastic group, such as
the rollouts, may come and go; one that joins later is constructed with `construct(member)`.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.messages.calls import WorkerSpec
from rl_core.workers import arguments
from rl_core.workers.cluster import Cluster, PendingCall
from rl_core.workers.importable import import_path
from rl_core.workers.member import Member
from rl_core.workers.result import WorkerGroupFuncResult

__all__ = ["Cluster", "WorkerGroup", "WorkerGroupFuncResult"]

logger = logging.getLogger(__name__)
MARGIN = 5.0
"""Seconds by which the deadline of the call to one rank exceeds that of the group call, so that the error names all missing ranks."""


class WorkerGroup:
    """One worker class, constructed in all processes of a group.

    A public method of the class is called on all ranks as `group.method(*args)`. The call returns a WorkerGroupFuncResult at once.
    """

    def __init__(self, cls: type | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Choose the class and its constructor arguments.

        `cls` is the class, or `module:Class` as text where importing the class would be slow. Raises ConfigError for a class that
        other processes cannot import by name and for arguments that cannot be serialized, and ValueError when a method of the class has the
        name of a method of WorkerGroup.
        """
        self._cls: type[Any] | None = None
        if not isinstance(cls, str):
            check_class(cls)
            self._path, self._cls = import_path(cls), cls
        elif cls.count(":") != 1:
            raise ConfigError(f"a worker class is named module:Class, got {cls!r}")
        else:
            self._path = cls
        self._args, self._kwargs = arguments.pack(args, kwargs or {})
        self._max_concurrency: int | None = None
        self._lock = threading.Lock()
        """Guards `_constructing`: the thread of `launch` and that of the hub may find a gang complete at the same time."""
        self._cluster: Cluster | None = None
        self._constructing: dict[str, tuple[tuple[int, int], PendingCall]] = {}
        """By name of a gang member: incarnation of the process in which the class was last constructed, and the call that does so."""
        self._name = ""

    @classmethod
    def of(cls, path: str, /, *args: Any, **kwargs: Any) -> "WorkerGroup":
        """Return a group of the class `module:Class`, which is imported only in the worker processes."""
        return cls(path, args, kwargs)

    @property
    def name(self) -> str:
        """Name of the group. Empty before `launch`."""
        return self._name

    @property
    def cluster(self) -> Cluster:
        """The cluster that `launch` was given. Raises RuntimeError before."""
        if self._cluster is None:
            raise RuntimeError(
                f"the group of {self._path} must be launched before it is used; call launch(cluster, name=...)"
            )
        return self._cluster

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: object | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        timeout: float | None = None,
    ) -> "WorkerGroup":
        """Construct the class in the processes of the group `name`; return self. In a job their pods have started them.

        - `placement_strategy`: which slots of the cluster of a script each process gets (`rl_core.plan.placement`); None means one process
          in each slot. In a job `spec.placement` places the processes, and any other value than None raises ConfigError.
        - `isolate_gpu`: whether a process sees its own GPUs only. It must be true in a job.
        - `name`: name of the group; None means the only one.
        - `max_concurrency`: largest number of sync methods, and of async methods, that run at the same time in each worker. None means 1
          and 64.
        - `timeout`: seconds; None means `deadlines.waitReady`.

        Before the hub has started, nothing is waited for: members are constructed when they join, and `cluster.wait_ready` waits for them.
        Afterwards `launch` waits for all ranks of a fixed group, or for the present members of an elastic one, and raises the error of a
        construction.
        """
        name = self._only_group(cluster) if name is None else name
        cluster.start_group(name, placement_strategy, isolate_gpu=isolate_gpu)
        self._cluster, self._max_concurrency, self._name = cluster, max_concurrency, name
        limit = cluster.ready_deadline if timeout is None else timeout
        if self._elastic:
            pending = [
                cluster.construct(m.name, self._spec(), timeout=limit)
                for m in cluster.members()
                if m.group == self.name
            ]
            for call in pending:
                call.future.result()
            return self
        if not cluster.sizes.get(self.name):
            cluster.sizes[self.name] = max((m.world_size for m in cluster.members() if m.group == self.name), default=1)
        self._constructing.clear()
        cluster.on_joined(self._construct_joined)
        if cluster.hub.started:
            cluster.wait_ready([self.name], limit)
            # A member that held another worker was ready before, so `wait_ready` did not wait for it.
            for _, call in list(self._constructing.values()):
                call.future.result()
        return self

    def construct(self, member: Member, timeout: float | None = None) -> None:
        """Construct the class in a member that has joined, and wait for it.

        A member that already holds an equal object keeps it and enters the present epoch. `timeout` is in seconds; None means
        `deadlines.waitReady`. Raises the error of the construction, WorkerLost and DeadlineExceeded.
        """
        limit = self.cluster.ready_deadline if timeout is None else timeout
        self.cluster.construct(member.name, self._spec(), timeout=limit).future.result()

    @property
    def world_size(self) -> int:
        """Number of ranks that a call reaches at the moment."""
        return len(self._ranks())

    def execute_on(self, *ranks: int) -> "GroupView":
        """Return a view of the group whose calls go to `ranks` only. Raises ValueError for a rank that is not present."""
        present = self._ranks()
        unknown = [rank for rank in ranks if type(rank) is not int or rank not in present]
        if unknown or not ranks:
            raise ValueError(f"ranks of group {self.name} must be among {present}, got {unknown or 'none'}")
        return GroupView(self, tuple(dict.fromkeys(ranks)))

    def within(self, seconds: float) -> "GroupView":
        """Return a view of the group whose calls may take `seconds` instead of `deadlines.groupMethod`."""
        return GroupView(self, None, seconds)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        self.__dict__[method] = bound = self._method(method, None)
        return bound

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _elastic(self) -> bool:
        kind = self.cluster.kinds.get(self.name)
        return kind is not None and kind.elastic

    def _method(self, method: str, ranks: tuple[int, ...] | None, seconds: float | None = None) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(f"{method} is private; only public methods of {self._path} can be called on the group")
        if self._cls is not None:
            attribute = inspect.getattr_static(self._cls, method, None)
            if attribute is None:
                raise AttributeError(f"{self._path} has no method {method!r}")
            if isinstance(attribute, staticmethod):
                return getattr(self._cls, method)  # type: ignore[no-any-return]

        def call(*args: Any, **kwargs: Any) -> WorkerGroupFuncResult:
            cluster = self.cluster
            called_ranks = self._ranks() if ranks is None else ranks
            limit = cluster.method_deadline if seconds is None else seconds
            calls = {
                rank: cluster.submit(f"{self.name}:{rank}", method, args, kwargs, timeout=limit + MARGIN)
                for rank in called_ranks
            }
            return WorkerGroupFuncResult(self.name, method, calls, default_timeout=limit)

        call.__name__ = method
        return call

    def _ranks(self) -> list[int]:
        if self._elastic:
            return [m.rank for m in self.cluster.members() if m.group == self.name and m.state.constructed]
        return list(range(self.cluster.sizes[self.name]))

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(path=self._path, args=self._args, kwargs=self._kwargs, max_concurrency=self._max_concurrency)

    def _construct_joined(self, member: Member) -> None:
        """Construct the class in all members of a gang as soon as the last of them has joined.

        Not earlier: the ranks wait for each other during construction, at most for deadlines.collective.
        """
        if member.group != self.name:
            return
        members = {m.rank: m for m in self.cluster.members() if m.group == self.name} | {member.rank: member}
        if len(members) >= self.cluster.sizes[self.name]:
            for present in members.values():
                self._construct_once(present)

    def _construct_once(self, member: Member) -> None:
        with self._lock:
            if member.name not in self._constructing or self._constructing[member.name][0] != member.incarnation:
                call = self.cluster.construct(member.name, self._spec(), timeout=self.cluster.ready_deadline)
                self._constructing[member.name] = (member.incarnation, call)

    def _only_group(self, cluster: Cluster) -> str:
        groups = sorted({*cluster.sizes, *(m.group for m in cluster.members())})
        if len(groups) != 1:
            raise ConfigError(
                f"launch(name=...) must name the group of processes to use, got None with groups {groups}"
            )
        return groups[0]


class GroupView:
    """Some ranks of a group. Methods are called on it as on a WorkerGroup, and run on these ranks only."""

    def __init__(self, group: WorkerGroup, ranks: tuple[int, ...] | None, seconds: float | None = None) -> None:
        """Call `ranks` (None: all ranks) with a limit of `seconds` per call (None: `deadlines.groupMethod`)."""
        self._group = group
        self._ranks = ranks
        self._seconds = seconds

    def __getattr__(self, method: str) -> Callable[..., Any]:
        self.__dict__[method] = bound = self._group._method(method, self._ranks, self._seconds)
        return bound


GROUP_NAMES = frozenset(name for name in dir(WorkerGroup) if not name.startswith("_"))
"""Public names of WorkerGroup. A worker class must not define methods of these names, because they could not be called on a group."""

HOOKS = {"on_new_epoch": ("epoch",), "drain": (), "close": ()}
"""Methods that the process of a worker calls by itself, with their arguments; see Worker."""


def check_class(cls: type[Any]) -> None:
    """Check that `cls` can be the class of a remote worker.

    Raises ConfigError when it does not derive from Worker, and ValueError when one of its methods has the name of a method of WorkerGroup,
    or that of a hook and other arguments.
    """
    if not hasattr(cls, "remote_methods"):
        raise ConfigError(f"{cls.__qualname__} must derive from rl_core.workers.worker.Worker")
    clashes = sorted(GROUP_NAMES & cls.remote_methods())
    if clashes:
        raise ValueError(
            f"{cls.__qualname__} must not define {', '.join(clashes)}: WorkerGroup has methods of these names; rename them"
        )
    for name, args in HOOKS.items():
        if name in cls.remote_methods():
            try:
                inspect.signature(getattr(cls, name)).bind("self", *args)
            except TypeError as error:
                called = f"{name}({', '.join(args)})"
                raise ValueError(
                    f"{cls.__qualname__}.{name} must be callable as {called}, a hook of Worker, got: {error}; rename the method"
                ) from error
