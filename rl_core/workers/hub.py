"""The hub: the runner's end of every worker's registration, heartbeats and loss (runtime.md 3.4). Lives in the runner process.

RPC methods: `hello(report)`, `heartbeat(name, incarnation, report)`, `goodbye(name, incarnation)`, `child_ended(name,
incarnation, code)`, and those the runner adds. Who may connect: curve.ALLOWED["hub"]; each role calls its own methods only.
hello and its kin answer older epochs too, because that is how a member of an older epoch learns the right one.

What the runner does when a member comes or goes (`listen`) runs on a thread of its own, so that it may block without hurting the hub.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.identity import Identity
from rl_core.transports.rpc import RpcServer, current_caller
from rl_core.transports.sockets import is_loopback, split_address
from rl_core.workers.member import Member, MemberState
from rl_core.workers.membership import Change, Membership

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.transports.curve import KeyRing

__all__ = ["Hub", "Member", "MemberState"]

logger = logging.getLogger(__name__)
_SWEEP_SECONDS = 0.5
_UNFENCED = frozenset({"hello", "heartbeat", "goodbye", "child_ended"})
_CALLERS = {
    **dict.fromkeys(("actor", "rollout", "env"), ("hello", "heartbeat", "goodbye")),
    "supervisor": ("child_ended",),
}
"""Methods by the role that may call them, where there are keys."""


class Hub:
    """Knows every worker process of the job and tells the runner when one comes or is gone."""

    def __init__(
        self,
        *,
        identity: Identity,
        job: "RLJob | None" = None,
        keys: "KeyRing | None" = None,
        files: Mapping[str, bytes] | None = None,
        bind: str | None = None,
        heartbeat_seconds: float = 2.0,
        suspect_seconds: float = 6.0,
        lost_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to serve at `bind` (None: RLJOB_HUB of the identity). The job's deadlines win over the seconds given here.

        `files` (model configuration and tokenizer by name) are handed to actors and rollouts at hello.
        """
        if job is not None:
            deadlines = job.spec.runtime.deadlines
            heartbeat_seconds, suspect_seconds, lost_seconds = deadlines.heartbeat, deadlines.suspect, deadlines.lost
        self.identity = identity
        self.job = job
        self.keys = keys
        self.clock = clock
        self.started = False
        self._files = dict(files or {})
        self._job_dump = job.model_dump(mode="json", by_alias=True) if job is not None else None
        self._heartbeat = heartbeat_seconds
        # Well below what the membership takes for a pause of this process, which it forgives: else nobody would ever be judged.
        self._sweep_seconds = min(_SWEEP_SECONDS, suspect_seconds / 4)
        self._membership = Membership(
            uid=identity.uid,
            epoch=identity.epoch,
            suspect_seconds=suspect_seconds,
            lost_seconds=lost_seconds,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watchers: list[Callable[[Change], None]] = []
        self._joined: list[Callable[[Member], object]] = []
        self._lost: list[Callable[[Member, str], object]] = []
        self._queue: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        handlers = {
            "hello": self._hello,
            "heartbeat": self._heartbeat_of,
            "goodbye": self._goodbye,
            "child_ended": self._child_ended,
        }
        self._callers = {role: set(names) for role, names in _CALLERS.items()}
        allowed = self._callers if keys is not None else None
        self._server = RpcServer(
            bind or _bindable(identity.hub), handlers, keys, identity, unfenced=_UNFENCED, allowed=allowed
        )

    @property
    def address(self) -> str:
        """Address of the hub once started."""
        return self._server.address

    @property
    def epoch(self) -> int:
        """Epoch of the job as this runner was started."""
        return self._membership.epoch

    def add_handlers(self, handlers: Mapping[str, Callable[..., Any]], *, role: str) -> None:
        """Serve methods of the runner (`admit`, `give_back`) on the hub's address, to the members of `role`."""
        self._callers[role] |= handlers.keys()
        self._server.add_handlers(handlers)

    def listen(
        self,
        *,
        joined: Callable[[Member], object] | None = None,
        lost: Callable[[Member, str], object] | None = None,
    ) -> None:
        """Call `joined(member)` for every member that says hello and `lost(member, reason)` for every one that is gone.

        All listeners run on one thread, change by change and in the order they were added; they may block. Raises RuntimeError
        after `start`: a late listener would miss members.
        """
        if self.started:
            raise RuntimeError("hub.listen must be called before hub.start; a late listener would miss members")
        self._joined += [joined] if joined is not None else []
        self._lost += [lost] if lost is not None else []

    def start(self) -> "Hub":
        """Listen and judge silence from here on. Raises ConfigError when the port is in use."""
        self._server.start()
        self.started = True
        threading.Thread(target=self._sweep, name="hub-sweep", daemon=True).start()
        threading.Thread(target=self._tell, name="hub-callbacks", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._queue.put(None)
        if self.started:
            self._server.close()

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members of `role` (None: all) that are not gone, by group and rank; with `drained`, `lost` those too."""
        with self._lock:
            return self._membership.members(role, drained=drained, lost=lost)

    def get(self, name: str) -> Member | None:
        """Return the member `group:rank`, gone or not; None when it never said hello."""
        with self._lock:
            return self._membership.get(name)

    def refused(self) -> dict[str, int]:
        """Return the refused hellos by reason."""
        with self._lock:
            return dict(self._membership.refused)

    def watch(self, on_change: Callable[[Change], None]) -> None:
        """Call `on_change` for every change at once, on the thread that brought it; it must not block (Cluster)."""
        self._watchers.append(on_change)

    @property
    def version(self) -> int:
        """Rises with every change of a member's state, version or presence."""
        with self._lock:
            return self._membership.version

    def wait_changed(self, version: int, seconds: float) -> None:
        """Wait until `version` is no longer the present one, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._membership.version != version, seconds)

    def give_up(self, member: Member, reason: str) -> None:
        """Take a member for lost although it lives; it says hello again, as the same process or a new one."""
        with self._lock:
            self._membership.give_up(member.name, member.incarnation, reason)
        self._spread()

    # --- RPC -------------------------------------------------------------------------------------------------------

    async def _hello(self, report: dict[str, Any]) -> dict[str, Any]:
        caller = current_caller()
        if caller is not None and caller.role != report.get("role"):
            raise ConfigError(f"a process of role {caller.role} must not say hello as {report.get('role')!r}")
        with self._lock:
            answer = self._membership.hello(report)
        self._spread()
        if not answer["accepted"]:
            logger.warning(
                "refused %s:%s of pod %s: %s",
                report.get("group"),
                report.get("rank"),
                report.get("pod"),
                answer["reason"],
            )
            return answer
        files = {} if report["role"] == "env" else self._files
        return {**answer, "heartbeat_seconds": self._heartbeat, "job": self._job_dump, "files": files}

    async def _heartbeat_of(self, name: str, incarnation: tuple[int, int], report: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            answer = self._membership.heartbeat(name, tuple(incarnation), report)  # type: ignore[arg-type]
        self._spread()
        return answer

    async def _goodbye(self, name: str, incarnation: tuple[int, int]) -> None:
        with self._lock:
            self._membership.goodbye(name, tuple(incarnation))  # type: ignore[arg-type]
        self._spread()

    async def _child_ended(self, name: str, incarnation: tuple[int, int], code: int) -> None:
        with self._lock:
            self._membership.child_ended(name, tuple(incarnation), code)  # type: ignore[arg-type]
        self._spread()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        while not self._ended.wait(self._sweep_seconds):
            with self._lock:
                self._membership.sweep()
            self._spread()

    def _spread(self) -> None:
        with self._changed:
            changes = self._membership.take_changes()
            self._changed.notify_all()
        for change in changes:
            for watcher in self._watchers:
                watcher(change)
            self._queue.put(change)

    def _tell(self) -> None:
        while (change := self._queue.get()) is not None:
            member = change.member
            if change.kind == "joined":
                logger.info("%s joined from pod %s (incarnation %s.%s)", member.name, member.pod, *member.incarnation)
                calls = [functools.partial(listener, member) for listener in self._joined]
            else:
                drained = member.state is MemberState.DRAINED
                level, what = (logging.INFO, "has left") if drained else (logging.WARNING, "is lost")
                logger.log(level, "%s %s: %s", member.name, what, change.reason)
                calls = [functools.partial(listener, member, change.reason) for listener in self._lost]
            for call in calls:
                self._guarded(call, change)

    def _guarded(self, call: Callable[[], object], change: Change) -> None:
        try:
            call()
        except RLJobError as error:
            logger.error("the runner's %s listener for %s failed: %s", change.kind, change.member.name, error)
        except Exception:  # a bug in one listener must not stop the others
            logger.exception("the runner's %s listener for %s failed", change.kind, change.member.name)


def _bindable(address: str) -> str:
    """Return where to listen so that others reach `address`: loopback as it is, a pod's service name on all interfaces."""
    host, port = split_address(address)
    return address if is_loopback(host) else f"tcp://0.0.0.0:{port}"
