"""What a worker knows about its process and job, and what the heartbeats tell about it. The host owns it; workers read it.

Used from three sides: the host's control thread (heartbeats, view), the worker's loop, and the worker's method thread.
Everything is guarded by one lock and held for microseconds.
"""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import InfrastructureError
from rl_core.api.identity import Identity
from rl_core.observability import logging as process_log
from rl_core.transports.rpc import RpcClient
from rl_core.workers import processes
from rl_core.workers.member import Member, MemberState

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.transports.curve import KeyRing


def stand_alone_identity() -> Identity:
    """Return the identity of a worker that lives outside a job (a unit test, a notebook): rank 0 of 1, epoch 0."""
    return Identity(
        job="stand-alone",
        namespace="default",
        uid="stand-alone",
        epoch=0,
        role="worker",
        pod="",
        pod_index=0,
        group="worker",
        rank=0,
        world_size=1,
    )


@dataclass(slots=True)
class _Wait:
    what: str
    on: str
    since: float


@dataclass(slots=True)
class _Waiter:
    """Someone on an event loop who waits for the next view."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:
            return  # its loop is closed


class WorkerContext:
    """Identity, job, view of the other members, state and counters of this process."""

    def __init__(
        self,
        identity: Identity | None = None,
        *,
        keys: "KeyRing | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = stand_alone_identity() if identity is None else identity
        self.keys = keys
        self.epoch = self.identity.epoch
        self.job: RLJob | None = None
        self.files: dict[str, bytes] = {}
        self.device_uuids: tuple[str, ...] = ()
        self.address = ""
        """Address of this process's RPC server."""
        self.hub: RpcClient | None = None
        self.state = MemberState.JOINING
        self.retired = False
        """Whether this process was told to drain for good; it takes no work any more, also of later epochs."""
        self.policy_version: int | None = None
        self.digest: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when something should be reported at once."""
        self._clock = clock
        self._lock = threading.Lock()
        self._progress: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._waits: dict[int, _Wait] = {}
        self._wait_ids = itertools.count()
        self._members: dict[str, Member] = {}
        self._view_version = -1
        self._waiters: list[_Waiter] = []
        self._peers: dict[str, RpcClient] = {}

    # --- told by the worker ----------------------------------------------------------------------------------------

    def record_progress(self, kind: str, n: float = 1) -> None:
        """Count progress: the stall detector watches that some counter of the job moves."""
        with self._lock:
            self._progress[kind] = self._progress.get(kind, 0) + n

    def record_metric(self, name: str, value: float) -> None:
        """Set a gauge that travels with the heartbeats."""
        with self._lock:
            self._metrics[name] = value

    def set_state(self, state: str) -> None:
        """Tell the hub a new state at once. A retired process only drains: other states are not taken."""
        wanted = MemberState(state)
        if not self.retired or wanted in (MemberState.DRAINING, MemberState.DRAINED):
            self.state = wanted
            self.on_change()

    def set_policy_version(self, version: int | None, digest: str | None) -> None:
        """Tell the hub at once which weights this process holds."""
        self.policy_version, self.digest = version, digest
        process_log.set_policy_version(version)
        self.on_change()

    @contextmanager
    def waiting(self, what: str, on: str) -> Iterator[None]:
        """Declare a wait for `what` on `on` (a member, role or channel) while the block runs; the oldest one is reported."""
        number = next(self._wait_ids)
        with self._lock:
            self._waits[number] = _Wait(what, on, self._clock())
        try:
            yield
        finally:
            with self._lock:
                del self._waits[number]

    def report(self) -> dict[str, Any]:
        """Return the heartbeat's report."""
        with self._lock:
            wait = min(self._waits.values(), key=lambda w: w.since, default=None)
            return {
                "state": self.state.value,
                "policy_version": self.policy_version,
                "digest": self.digest,
                "progress": dict(self._progress),
                "metrics": dict(self._metrics),
                "wait": None
                if wait is None
                else {"what": wait.what, "on": wait.on, "since_seconds": self._clock() - wait.since},
                "memory_bytes": processes.memory_bytes(os.getpid()),
                "view_version": self._view_version,
            }

    # --- told by the hub -------------------------------------------------------------------------------------------

    def update_view(self, view: Mapping[str, Any] | None) -> None:
        """Take in the members that changed; calls to those that are gone fail at once."""
        if view is None:
            return
        changed = [Member.from_view(entry) for entry in view["members"]]
        with self._lock:
            self._view_version = view["version"]
            left = [
                self._members[m.name] for m in changed if m.name in self._members and _left(self._members[m.name], m)
            ]
            self._members.update({m.name: m for m in changed})
            clients = [(member, self._peers.pop(member.address)) for member in left if member.address in self._peers]
            waiters, self._waiters = self._waiters, []
        for member, client in clients:
            client.fail(f"{member.name} is lost")
            client.close()
        for waiter in waiters:
            waiter.wake()

    def enter_epoch(self, epoch: int) -> None:
        """Speak and hear as `epoch` from now on."""
        self.epoch = epoch
        process_log.set_epoch(epoch)
        with self._lock:
            clients = list(self._peers.values())
        for client in clients:
            client.set_epoch(epoch)
        if self.hub is not None:
            self.hub.set_epoch(epoch)

    def forget_view(self) -> None:
        """Know nobody: the hub is gone and its successor counts its view from 0."""
        with self._lock:
            self._members.clear()
            self._view_version = -1

    def members(self, role: str | None = None) -> list[Member]:
        """Return the members of `role` (None: all) that are not gone, by group and rank, as of the last heartbeat."""
        with self._lock:
            found = [m for m in self._members.values() if not m.state.gone and role in (None, m.role)]
        return sorted(found, key=lambda m: (m.group, m.rank))

    async def view_changed(self) -> None:
        """Wait until the view changes; the caller bounds the wait."""
        waiter = _Waiter(asyncio.get_running_loop())
        with self._lock:
            self._waiters.append(waiter)
        await waiter.event.wait()

    # --- connections -----------------------------------------------------------------------------------------------

    def hub_client(self) -> RpcClient:
        """Return the client of the runner's hub. Raises InfrastructureError outside a job."""
        if self.hub is None:
            raise InfrastructureError("this worker lives outside a job and has no hub to call")
        return self.hub

    def peer(self, address: str, service: str | None = None) -> RpcClient:
        """Return the client of the worker at `address`, made at first use; `service` (its role) is known for members in view."""
        with self._lock:
            client = self._peers.get(address)
            role = next((m.role for m in self._members.values() if m.address == address), None)
        if client is not None:
            return client
        client = RpcClient(address, self.keys, self.identity, service=service or role)
        client.set_epoch(self.epoch)
        with self._lock:
            kept = self._peers.setdefault(address, client)
        if kept is not client:
            client.close()
        return kept

    def close(self) -> None:
        """Close all connections to peers."""
        with self._lock:
            clients, self._peers = list(self._peers.values()), {}
        for client in clients:
            client.close()


def _left(old: Member, new: Member) -> bool:
    return not old.state.gone and (new.state.gone or new.incarnation != old.incarnation or new.address != old.address)
