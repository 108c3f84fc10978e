"""The runner's access to the worker processes of a job: which are planned, which are present, and calls to them by name.

Invariant: a call to a member fails with WorkerLost as soon as the hub knows that the member is gone.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rl_core.api.errors import ConfigError, DeadlineExceeded, RLJobError, WorkerLost
from rl_core.messages.calls import MethodResult, WorkerSpec
from rl_core.messages.members import MemberState
from rl_core.plan.groups import BUILT_IN, GroupKind, groups_of
from rl_core.plan.slots import pod_of
from rl_core.transports.rpc import RpcClient
from rl_core.workers.deadline_wait import DeadlineWait
from rl_core.workers.hub import Hub
from rl_core.workers.mail import delete_stored
from rl_core.workers.member import Member
from rl_core.workers.membership import Change

_LOOK_SECONDS = 1.0
"""Seconds between two checks for failed constructions during `wait_ready`. The hub does not announce such a failure."""


class PendingCall:
    """A call to one member that is in progress. Implements `result.RankCall`."""

    def __init__(self, member_name: str, hub: Hub, future: "concurrent.futures.Future[Any]") -> None:
        self.future = future
        self._name = member_name
        self._hub = hub
        self._start = time.monotonic()

    def cancel(self) -> None:
        """Cancel the call, and its handler if the handler can be cancelled."""
        self.future.cancel()

    def describe(self) -> str:
        """Return one line about the member for an error message.

        It contains the member's name, pod, seconds since the call began, state, counters and last heartbeat, for example `actor:1 (pod
        j-actor-1, 12.0 s, serving, tokens 55, last heartbeat 0.4 s ago)`.
        """
        member = self._hub.get(self._name)
        elapsed = f"{time.monotonic() - self._start:.1f} s"
        if member is None:
            return f"{self._name} (never seen, {elapsed})"
        parts = [f"pod {member.pod}", elapsed, member.state.value]
        parts += [f"{kind} {count:g}" for kind, count in member.progress.items()]
        if (wait := member.wait) is not None:
            parts.append(f"waits for {wait.what} on {wait.on} since {wait.since_seconds:.1f} s")
        parts.append(f"last heartbeat {self._hub.clock() - member.last_seen:.1f} s ago")
        return f"{self._name} ({', '.join(parts)})"


class Cluster:
    """The worker processes of one job, as the runner sees them. This is not the Kubernetes cluster.

    Members are named `group:rank`, for example `actor:0`.
    """

    def __init__(
        self, hub: Hub, *, sizes: Mapping[str, int] | None = None, ready_deadline: float | None = None
    ) -> None:
        """Use the members of `hub`.

        `sizes` gives the planned number of processes per group; None takes it from the job. `ready_deadline` is the number of seconds that
        processes have to become ready; None means `deadlines.waitReady` of the job, or 600 without a job.
        """
        self.hub = hub
        spec = hub.job.spec if hub.job is not None else None
        planned_groups = groups_of(spec) if spec is not None else {}
        self.kinds: Mapping[str, GroupKind] = planned_groups or BUILT_IN
        """Groups of the job by name."""
        if sizes is None:
            sizes = {group.name: group.world_size for group in planned_groups.values()}
        self.sizes = dict(sizes or {})
        deadlines = spec.runtime.deadlines if spec is not None else None
        self.rpc_deadline = deadlines.rpc if deadlines else 60.0
        planned = deadlines.wait_ready if deadlines else 600.0
        self.ready_deadline = planned if ready_deadline is None else ready_deadline
        self.method_deadline = deadlines.group_method if deadlines else 3600.0
        self._spec = spec
        self._clients: dict[str, tuple[Member, RpcClient]] = {}
        self._failures: dict[str, BaseException] = {}
        """Error of a member's last construction, if it failed, by member name."""
        self._lock = threading.Lock()
        """Guards `_clients` and `_failures`. The I/O thread and the hub's watchers take it: nobody may wait for the I/O thread while holding it."""
        self._on_joined: list[Callable[[Member], None]] = []
        hub.add_watcher(self._on_change)

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members of `role` ordered by group and rank. `role` None returns the members of all roles.

        Members that are lost or have drained are left out unless `lost` or `drained` is true.
        """
        return self.hub.members(role, drained=drained, lost=lost)

    def start_group(self, name: str, placement_strategy: object | None, *, isolate_gpu: bool) -> None:
        """Do nothing: the launch plan of a job has placed its processes, and the supervisors of the pods start them.

        Raises ConfigError for a placement strategy and for `isolate_gpu` false, which have no effect in a job. The cluster of a script
        overrides this method.
        """
        if placement_strategy is not None or not isolate_gpu:
            raise ConfigError(
                f"the launch plan has placed the processes of group {name} with isolated devices; got "
                f"placement_strategy={placement_strategy!r}, isolate_gpu={isolate_gpu}: set spec.placement of the job instead"
            )

    def wait_ready(
        self, roles: Iterable[str], timeout: float | None = None, *, on_poll: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until every planned process of `roles` has constructed its worker object.

        `timeout` is in seconds; None means `ready_deadline`. `on_poll()` is called at least once a second while this waits, and an
        exception that it raises ends the wait. Raises DeadlineExceeded with the name, pod and state of each missing process, and the error
        of a construction that failed.
        """
        roles = [roles] if isinstance(roles, str) else list(roles)
        limit = self.ready_deadline if timeout is None else timeout
        wait = DeadlineWait(f"processes of {', '.join(roles)}", limit, clock=self.hub.clock)

        def missing() -> str:
            return "; ".join(self.missing(roles))

        while True:
            version = self.hub.revision
            if not (names := missing()):
                return
            on_poll()
            pause = wait.pause(missing)
            if pause is None:
                raise DeadlineExceeded(f"processes must be ready within {limit:.0f} s, missing: {names}")
            # A failed construction does not change the version of the hub, so the wait is cut into short ones.
            self.hub.wait_changed(version, min(pause, _LOOK_SECONDS))

    def missing(self, roles: Iterable[str]) -> list[str]:
        """Return a line for each planned process of `roles` that has not constructed its worker: `group:rank`, pod and state.

        Raises the error of a construction that failed.
        """
        names = [f"{role}:{rank}" for role in roles for rank in range(self.sizes.get(role, 0))]
        self._raise_failures(names)
        return [text for name in names if (text := self._stage(name)) is not None]

    def retire(self, member_name: str) -> PendingCall:
        """Tell a member to drain and then to take no more work until its pod is deleted.

        Returns the call at once. The member's heartbeats report `draining`, then `drained`.
        """
        return self._submit(member_name, "retire", timeout=self.rpc_deadline)

    def call(self, member_name: str, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call `method` of the worker `group:rank`, wait, and return its result.

        `timeout` is in seconds; None means `deadlines.rpc`. Raises the worker's own error if it is an RLJobError and RemoteError otherwise,
        WorkerLost when the member is gone, and DeadlineExceeded.
        """
        pending = self.submit(
            member_name, method, args, kwargs, timeout=self.rpc_deadline if timeout is None else timeout
        )
        return pending.future.result().value

    def submit(
        self, member_name: str, method: str, args: Iterable[Any], kwargs: Mapping[str, Any], *, timeout: float
    ) -> PendingCall:
        """Start a call of `method` of the worker `group:rank` and return it without waiting.

        `timeout` is in seconds. Raises TypeError or ValueError when an argument cannot be serialized. A member that is gone gives a call
        that has failed with WorkerLost.
        """
        return self._submit(member_name, "execute", tuple(args), kwargs, timeout=timeout, target=method)

    def construct(self, member_name: str, spec: WorkerSpec, *, timeout: float) -> PendingCall:
        """Start the construction of a member's worker object from `spec` and return the call without waiting.

        `timeout` is in seconds. If the construction fails, `wait_ready` and `missing` raise its error as well.
        """
        with self._lock:
            self._failures.pop(member_name, None)
        pending = self._submit(member_name, "construct", (spec,), timeout=timeout)
        pending.future.add_done_callback(lambda future: self._constructed(member_name, future))
        return pending

    def on_joined(self, callback: Callable[[Member], None]) -> None:
        """Call `callback(member)` for each member that is present now and for each that registers later.

        It must not block.
        """
        self._on_joined.append(callback)
        for member in self.hub.members():
            callback(member)

    def close(self) -> None:
        """Close the RPC connections to all members."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for _, client in clients:
            client.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _submit(
        self,
        member_name: str,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout: float,
        target: str | None = None,
    ) -> PendingCall:
        future: concurrent.futures.Future[Any]
        try:
            future = self._client(member_name).start_call(method, args, dict(kwargs), timeout=timeout, target=target)
        except WorkerLost as error:
            future = concurrent.futures.Future()
            future.set_exception(error)
        return PendingCall(member_name, self.hub, future)

    def _client(self, member_name: str) -> RpcClient:
        with self._lock:
            # The state is read under the lock, so that a loss that is reported afterwards finds the new client.
            member = self._present(member_name)
            cached = self._clients.get(member_name)
            if cached is not None and cached[0].address == member.address:
                return cached[1]
            client = RpcClient(member.address, self.hub.keys, self.hub.identity, service=member.role)
            self._clients[member_name] = (member, client)
        if cached is not None:
            cached[1].fail(f"{member_name} has moved to {member.address}")
        return client

    def _present(self, member_name: str) -> Member:
        member = self.hub.get(member_name)
        if member is None:
            raise WorkerLost(f"{member_name} must be there to be called, but it never said hello")
        if member.state.gone:
            raise WorkerLost(f"{member_name} of pod {member.pod} is gone: {member.reason}")
        return member

    def _on_change(self, change: Change) -> None:
        if change.kind == "lost" or change.member.incarnation > (0, 0):
            # Repeated when the member is replaced, because others may have sent before they knew of the loss.
            delete_stored(change.member.name)
        if change.kind == "lost":
            with self._lock:
                cached = self._clients.get(change.member.name)
                if cached is not None and cached[0].incarnation > change.member.incarnation:
                    cached = None  # The client already belongs to the replacement.
                else:
                    self._clients.pop(change.member.name, None)
            if cached is not None:
                cached[1].fail(f"{change.member.name} is lost: {change.reason}")
        elif change.kind == "joined":
            for callback in self._on_joined:
                callback(change.member)

    def _constructed(self, name: str, future: "concurrent.futures.Future[MethodResult]") -> None:
        error = None if future.cancelled() else future.exception()
        # A WorkerLost is not stored, because the replacement of a lost member is constructed again.
        if error is not None and not isinstance(error, WorkerLost):
            with self._lock:
                self._failures[name] = error

    def _raise_failures(self, names: list[str]) -> None:
        with self._lock:
            failed = [(name, self._failures[name]) for name in names if name in self._failures]
        for name, error in failed:
            if isinstance(error, RLJobError):
                raise error
            raise RLJobError(f"{name} could not be constructed: {error}") from error

    def _stage(self, name: str) -> str | None:
        member = self.hub.get(name)
        role, _, rank = name.partition(":")
        job = self.hub.identity.job
        pod = pod_of(self._spec, job, role, int(rank)) if self._spec is not None else f"{job}-{role}-{rank}"
        if member is None:
            return f"{name} (pod {pod}: never seen)"
        if member.state.constructed:
            return None
        descriptions = {MemberState.JOINING: "hello", MemberState.LOST: f"lost: {member.reason}"}
        return f"{name} (pod {member.pod}: {descriptions.get(member.state, member.state.value)})"
