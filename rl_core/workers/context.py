"""State that a worker process shares between its threads: identity, job, other members, counters and connections.

The host's control thread uses it for heartbeats and registration; the worker object uses it through the methods of Worker, on its event
loop and in its method thread. One lock guards counters, waits, the members and the connections. It is held for microseconds and never
during a callback.
"""

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.api.errors import InfrastructureError
from rl_core.api.identity import Identity
from rl_core.messages.members import DeclaredWait, Heartbeat, MemberState, MemberView, View, WaitCause
from rl_core.observability import logging as process_log
from rl_core.plan.placement import Placement
from rl_core.transports.rpc import RpcClient
from rl_core.workers import processes

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.transports.curve import KeyRing


def stand_alone_identity() -> Identity:
    """Return the identity of a worker outside a job, as in a unit test or a notebook: rank 0 of 1, epoch 0."""
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
    what: str | Callable[[], str]
    on: str
    since: float
    cause: WaitCause | None

    def text(self) -> str:
        """Return the text that says what this process waits for at the moment."""
        return self.what if isinstance(self.what, str) else self.what()


class WorkerContext:
    """Identity, job, known members, state and counters of this process."""

    def __init__(
        self,
        identity: Identity | None = None,
        *,
        placement: Placement | None = None,
        keys: "KeyRing | None" = None,
        address: str = "",
        device_uuids: tuple[str, ...] = (),
        files: Mapping[str, bytes] | None = None,
        hub: RpcClient | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the context of one process. Without arguments it is that of a worker outside a job.

        - `identity`, `placement`: None means those of a worker outside a job.
        - `keys`: CURVE keys of the group; None in a job without keys.
        - `address`: address of this process's RPC server.
        - `device_uuids`: UUIDs of the accelerators that this process uses.
        - `files`: model files by name, until the runner's answer to `hello` replaces them.
        - `hub`: RPC client of the runner's hub; None until the first registration.
        - `on_change`: called, on any thread, when a heartbeat should be sent at once.
        - `clock`: returns seconds.
        """
        self.identity = stand_alone_identity() if identity is None else identity
        self.placement = Placement.from_env({}) if placement is None else placement
        self.keys = keys
        self.address = address
        self.device_uuids = device_uuids
        self.epoch = self.identity.epoch
        self.job: RLJob | None = None
        self.files = dict(files or {})
        """Model configuration and tokenizer files by name."""
        self.hub = hub
        """RPC client of the runner's hub. None before the first registration and outside a job."""
        self._silent_clients: list[RpcClient] = []
        """Earlier clients of a hub that became silent. They may have calls in progress. Only the thread that registers uses this list."""
        self.state = MemberState.JOINING
        self.retired = False
        """Whether this process takes no more work, even in later epochs. Set when the runner removes it from an elastic group."""
        self.policy_version: int | None = None
        self.digest: str | None = None
        self.weights_proof = ""
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._progress: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._read_metrics: Callable[[], Mapping[str, float]] = dict
        self._declared_waits: dict[int, _Wait] = {}
        self._wait_ids = itertools.count()
        self._members: dict[str, MemberView] = {}
        self._view_version = -1
        self.num_serving = 0
        """Members of this process's group that are in the state SERVING, as of the last heartbeat."""
        self._waiting_for_view: set[Callable[[], object]] = set()
        """One callback for each coroutine that waits in `view_changed`. It wakes the coroutine."""
        self._peers: dict[str, RpcClient] = {}

    # --- from the worker -------------------------------------------------------------------------------------------

    def record_progress(self, kind: str, n: float = 1) -> None:
        """Add `n` to the progress counter `kind`. The runner declares a run stalled when no counter moves."""
        with self._lock:
            self._progress[kind] = self._progress.get(kind, 0) + n

    def record_metric(self, name: str, value: float) -> None:
        """Set the gauge `name`, which each heartbeat sends to the runner."""
        with self._lock:
            self._metrics[name] = value

    def report_metrics(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Register the function `read`. Each heartbeat sends the gauges that it returns."""
        self._read_metrics = read

    def set_state(self, state: str) -> None:
        """Report a new state to the hub at once. A retired process ignores all states except draining and drained."""
        new_state = MemberState(state)
        if not self.retired or new_state in (MemberState.DRAINING, MemberState.DRAINED):
            self.state = new_state
            self._on_change()

    def retire(self) -> None:
        """Start to drain, and take no more work afterwards, also not in later epochs."""
        self.retired = True
        self.set_state(MemberState.DRAINING)

    def set_policy_version(self, version: int | None, digest: str | None, proof: str = "") -> None:
        """Report to the hub at once which weights this process holds.

        `version` and `digest` None mean no weights; `proof` says how the engine's weights were verified.
        """
        self.policy_version, self.digest, self.weights_proof = version, digest, proof
        process_log.set_policy_version(version)
        self._on_change()

    @contextlib.contextmanager
    def waiting(self, what: str | Callable[[], str], on: str, cause: WaitCause | None = None) -> Iterator[None]:
        """Declare that this process waits for `what` on `on` (a member, group or channel) while the block runs.

        A function as `what` is called for each heartbeat, on any thread.

        Heartbeats report the oldest of several waits. `cause` is described at `Worker.waiting`.
        """
        wait_id = next(self._wait_ids)
        with self._lock:
            self._declared_waits[wait_id] = _Wait(what, on, self._clock(), cause)
        try:
            yield
        finally:
            with self._lock:
                del self._declared_waits[wait_id]

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the present state, counters and gauges."""
        memory, read_metrics = processes.memory_bytes(os.getpid()), self._read_metrics()
        with self._lock:
            wait = min(self._declared_waits.values(), key=lambda w: w.since, default=None)
            wait_seconds = 0.0 if wait is None else self._clock() - wait.since
            return Heartbeat(
                state=self.state,
                policy_version=self.policy_version,
                digest=self.digest,
                weights_proof=self.weights_proof,
                progress=dict(self._progress),
                metrics={**self._metrics, **read_metrics},
                wait=None
                if wait is None
                else DeclaredWait(what=wait.text(), on=wait.on, since_seconds=wait_seconds, cause=wait.cause),
                memory_bytes=memory,
                view_version=self._view_version,
            )

    # --- from the hub ----------------------------------------------------------------------------------------------

    def welcome(self, job: "RLJob | None", files: Mapping[str, bytes], view: View) -> None:
        """Apply the hub's answer to `hello`: the job (None outside one), the model files and all members."""
        self.job = job
        self.files = dict(files) or self.files
        with self._lock:  # The successor of a lost hub numbers its views from 0 and may not know all members.
            self._members.clear()
            self._view_version = -1
        self.update_view(view)

    def update_view(self, view: View | None) -> None:
        """Apply the members that changed according to the hub. None means that nothing changed.

        Calls under way to members that are gone fail at once.
        """
        if view is None:
            return
        with self._lock:
            self._view_version = view.version
            departed = [
                self._members[m.name]
                for m in view.members
                if m.name in self._members and _left(self._members[m.name], m)
            ]
            self._members.update({m.name: m for m in view.members})
            clients = [
                (member, self._peers.pop(member.address)) for member in departed if member.address in self._peers
            ]
            wakes = list(self._waiting_for_view)
        for member, client in clients:
            client.fail(f"{member.name} is lost")
        for wake in wakes:
            with contextlib.suppress(RuntimeError):  # The event loop of the waiting coroutine was closed.
                wake()

    def enter_epoch(self, epoch: int) -> None:
        """Send messages with `epoch` from now on, and refuse messages of older epochs."""
        self.epoch = epoch
        process_log.set_epoch(epoch)
        with self._lock:
            clients = list(self._peers.values())
        for client in clients:
            client.set_epoch(epoch)
        if self.hub is not None:
            self.hub.set_epoch(epoch)

    def members(self, group: str | None = None) -> list[MemberView]:
        """Return the members of `group` that are not gone, ordered by group and rank. None means all groups that this process sees."""
        with self._lock:
            present = [m for m in self._members.values() if not m.state.gone and group in (None, m.group)]
        return sorted(present, key=lambda m: (m.group, m.rank))

    def member(self, name: str) -> MemberView | None:
        """Return the member `group:rank`, even if it is gone. None if this process has never seen it."""
        with self._lock:
            return self._members.get(name)

    def world_size_of(self, group: str) -> int:
        """Return the planned number of processes of `group`, even if all are gone. 0 if this process has seen no member of the group.

        Members of a job see those of their own group only if they may call them. Their own number tells them the size.
        """
        with self._lock:
            members = [m for m in self._members.values() if m.group == group]
        default = self.identity.world_size if group == self.identity.group else 0
        return max((m.world_size for m in [m for m in members if not m.state.gone] or members), default=default)

    async def view_changed(self) -> None:
        """Wait until the hub reports a change of the members. The wait has no timeout; the caller sets one."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._waiting_for_view.add(wake)
        try:
            await changed.wait()
        finally:
            with self._lock:
                self._waiting_for_view.discard(wake)

    def wait_view_changed(self, seconds: float) -> None:
        """Ask the hub now which members have changed, and wait at most `seconds` until it reports a change."""
        changed = threading.Event()
        with self._lock:
            self._waiting_for_view.add(changed.set)
        self._on_change()
        changed.wait(seconds)
        with self._lock:
            self._waiting_for_view.discard(changed.set)

    # --- connections -----------------------------------------------------------------------------------------------

    def replace_hub(self, client: RpcClient) -> None:
        """Use `client` for the hub from now on and close earlier clients. Calls under way on them fail."""
        old_clients, self._silent_clients = [*self._silent_clients, *([self.hub] if self.hub is not None else [])], []
        self.hub = client
        for old_client in old_clients:
            old_client.close()

    def reconnect_hub(self, client: RpcClient) -> None:
        """Use `client` for a hub that is silent, because it may connect to a restarted runner.

        Earlier clients stay open with their calls under way, because the old connection may recover. `hub_answered` closes them.
        """
        if self.hub is not None:
            self._silent_clients.append(self.hub)
        self.hub = client

    def hub_answered(self) -> None:
        """Close the earlier clients of the hub that have no call under way."""
        idle = [client for client in self._silent_clients if client.idle]
        self._silent_clients = [client for client in self._silent_clients if client not in idle]
        for client in idle:
            client.close()

    def hub_client(self) -> RpcClient:
        """Return the RPC client of the runner's hub. Raises InfrastructureError outside a job."""
        if self.hub is None:
            raise InfrastructureError("this worker lives outside a job and has no hub to call")
        return self.hub

    def peer(self, address: str, service: str | None = None) -> RpcClient:
        """Return the RPC client of the worker at `address`, which is created at its first use.

        `service` is the group of that worker. It may be None for a worker that `members` lists.
        """
        with self._lock:
            client = self._peers.get(address)
            if client is None:
                role = next((m.role for m in self._members.values() if m.address == address), None)
                client = self._peers[address] = RpcClient(address, self.keys, self.identity, service=service or role)
                client.set_epoch(self.epoch)
            return client

    def close(self) -> None:
        """Close the connections to all other workers. The connection to the hub stays open."""
        with self._lock:
            clients, self._peers = list(self._peers.values()), {}
        for client in clients:
            client.close()


def _left(old: MemberView, new: MemberView) -> bool:
    return not old.state.gone and (new.state.gone or new.incarnation != old.incarnation or new.address != old.address)
