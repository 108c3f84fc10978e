"""The hub: the part of the runner with which every worker registers, to which it sends heartbeats, and which declares it lost.

It serves the RPC methods of `messages.members` and those that the runner adds. Each group may call its own methods only. `hello`,
`heartbeat`, `goodbye` and `child_ended` are also answered to callers of an older epoch, because that is how they learn the present one.

Listeners (`add_listeners`) run on a thread of their own, so that they may block without delaying the hub. Watchers (`add_watcher`) run on
the thread that made the change, before anything else sees it, and must not block.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.identity import Identity
from rl_core.messages.members import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatAnswer,
    HelloAccepted,
    HelloRefused,
    HelloReport,
    MemberId,
    MemberState,
)
from rl_core.plan.groups import BUILT_IN, GroupKind, groups_of
from rl_core.transports.rpc import RpcServer, current_caller, current_caller_host
from rl_core.transports.sockets import is_loopback, split_address
from rl_core.workers.member import Member
from rl_core.workers.membership import Change, Membership
from rl_core.workers.receive_cycles import ReceiveCycles

if TYPE_CHECKING:
    from rl_core.api.job import RLJob
    from rl_core.transports.curve import KeyRing

__all__ = ["Hub", "Member", "MemberState"]

logger = logging.getLogger(__name__)
_SWEEP_SECONDS = 0.5
_UNFENCED = frozenset({"hello", "heartbeat", "goodbye", "child_ended"})
_MEMBER_METHODS = frozenset({"hello", "heartbeat", "goodbye", "receive_cycle"})
_SUPERVISOR_METHODS = frozenset({"child_ended"})


class Hub:
    """Keeps the members of the job, and informs the runner when one joins or is lost."""

    def __init__(
        self,
        *,
        identity: Identity,
        job: "RLJob | None" = None,
        keys: "KeyRing | None" = None,
        files: Mapping[str, bytes] | None = None,
        bind: str | None = None,
        kinds: Mapping[str, GroupKind] = BUILT_IN,
        heartbeat_seconds: float = 2.0,
        suspect_seconds: float = 6.0,
        lost_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to serve; `start` begins to listen.

        - `identity`: identity of the runner.
        - `job`: the job that is sent to members. Its deadlines replace the seconds given here. None in tests.
        - `keys`: CURVE keys of the runner; None serves without authentication, on loopback.
        - `files`: model configuration and tokenizer by file name, sent at registration to the groups that hold the model.
        - `bind`: address to listen on; None derives it from the hub address of the identity.
        - `kinds`: the groups without a job, by the role of their members; those of a job are its own.
        - `heartbeat_seconds`: time between two heartbeats of a member.
        - `suspect_seconds`, `lost_seconds`: silence after which a member is suspect, and lost.
        - `clock`: returns seconds.
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
        self._job_json = _as_json(job)
        self._heartbeat_seconds = heartbeat_seconds
        # Well below the gap after which the membership assumes that this process was paused, and extends all deadlines.
        self._sweep_seconds = min(_SWEEP_SECONDS, suspect_seconds / 4)
        self._kinds: Mapping[str, GroupKind] = kinds if job is None else groups_of(job.spec)
        self._membership = Membership(
            uid=identity.uid,
            epoch=identity.epoch,
            suspect_seconds=suspect_seconds,
            lost_seconds=lost_seconds,
            views=visible_groups(self._kinds.values()) if job is not None else None,
            clock=clock,
        )
        self._lock = threading.Lock()
        """Guards the membership."""
        self._changed = threading.Condition(self._lock)
        """Notified after every change, for `wait_changed`."""
        self._order = threading.RLock()
        """Serializes changes until they are queued for the listeners. Otherwise a listener could be called for the join of a replacement
        before it is called for the loss that `sweep` has found. Acquired before `_lock`."""
        self._watchers: list[Callable[[Change], None]] = []
        self._joined: list[Callable[[Member], object]] = []
        self._loss_listeners: list[Callable[[Member, str], object]] = []
        self._queue: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._cycles = ReceiveCycles(self.get, clock=clock)
        handlers = {
            "hello": self._hello,
            "heartbeat": self._heartbeat,
            "goodbye": self._goodbye,
            "child_ended": self._child_ended,
            "receive_cycle": self._receive_cycle,
        }
        self._callers = {group: set(_MEMBER_METHODS) for group in self._kinds} | {
            "supervisor": set(_SUPERVISOR_METHODS)
        }
        """Names of methods by the role that may call them. Used only with keys."""
        allowed = self._callers if keys is not None else None
        self._server = RpcServer(
            bind or _bindable(identity.hub), handlers, keys, identity, unfenced=_UNFENCED, allowed=allowed
        )

    @property
    def address(self) -> str:
        """Address at which the hub listens, once it is started."""
        return self._server.address

    @property
    def epoch(self) -> int:
        """Epoch of the job: how often its gang was restarted."""
        return self._membership.epoch

    def add_handlers(self, handlers: Mapping[str, Callable[..., Any]], *, role: str) -> None:
        """Also serve these RPC methods, by name, to the members of `role`."""
        self._callers[role] |= handlers.keys()
        self._server.add_handlers(handlers)

    def add_listeners(
        self,
        *,
        joined: Callable[[Member], object] | None = None,
        lost: Callable[[Member, str], object] | None = None,
    ) -> None:
        """Call `joined(member)` for every member that registers and `lost(member, reason)` for every member that is lost or has drained.

        All listeners run one after the other on one thread, in the order of the changes and, for each change, in the order in which they
        were added. They may block. Raises RuntimeError after `start`, because a listener that is added late would miss members.
        """
        if self.started:
            raise RuntimeError("hub.add_listeners must be called before hub.start; a late listener would miss members")
        self._joined += [joined] if joined is not None else []
        self._loss_listeners += [lost] if lost is not None else []

    def start(self) -> "Hub":
        """Start to serve and to check for silent members; return self. Raises ConfigError when the port is in use."""
        self._server.start()
        self.started = True
        threading.Thread(target=self._sweep, name="hub-sweep", daemon=True).start()
        threading.Thread(target=self._run_listeners, name="hub-listeners", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop to serve."""
        self._stopped.set()
        self._queue.put(None)
        if self.started:
            self._server.close()

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members of `role` ordered by group and rank. `role` None returns the members of all roles.

        Members that are lost or have drained are left out unless `lost` or `drained` is true.
        """
        with self._lock:
            return self._membership.members(role, drained=drained, lost=lost)

    def get(self, name: str) -> Member | None:
        """Return the member `group:rank`, even if it is lost or has drained. None if it has never registered."""
        with self._lock:
            return self._membership.get(name)

    def add_watcher(self, on_change: Callable[[Change], None]) -> None:
        """Call `on_change(change)` for every member that joins or is lost, on the thread that made the change. It must not block."""
        self._watchers.append(on_change)

    @property
    def revision(self) -> int:
        """Number that rises with every change of a member's state or policy version and with every join and loss."""
        with self._lock:
            return self._membership.revision

    def wait_changed(self, revision: int, seconds: float) -> None:
        """Wait until `revision` is no longer the present revision, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._membership.revision != revision, seconds)

    def declare_lost(self, member: Member, reason: str) -> None:
        """Declare a member lost although it sends heartbeats.

        Its next heartbeat is refused. It registers again, either as the same process or, after a restart, as its replacement.
        """
        with self._changing() as membership:
            membership.declare_lost(member.id, reason)

    # --- RPC -------------------------------------------------------------------------------------------------------

    async def _hello(self, report: HelloReport) -> HelloAccepted | HelloRefused:
        if not isinstance(report, HelloReport):
            raise ConfigError(
                f"hello must be that of wire version {WIRE_VERSION}, got another; use images of one release"
            )
        member, caller = report.member, current_caller()
        if caller is not None and caller.role != member.role:
            raise ConfigError(f"a process of role {caller.role} must not say hello as {member.role!r}")
        self._check_caller(MemberId(name=member.name, incarnation=member.incarnation), "hello")
        if self.keys is not None and caller is not None and member.group != caller.group:
            raise ConfigError(f"a process of group {caller.group} must not say hello as one of {member.group!r}")
        with self._changing() as membership:
            refusal = membership.hello(report, current_caller_host())
            view = membership.view(member.group)
        if refusal is not None:
            logger.warning("refused %s of pod %s: %s", member.name, member.pod, refusal)
            return HelloRefused(reason=refusal, epoch=self.epoch)
        kind = self._kinds.get(member.group)
        files = self._files if kind is not None and kind.holds_model else {}
        return HelloAccepted(heartbeat_seconds=self._heartbeat_seconds, view=view, job=self._job_json, files=files)

    async def _heartbeat(self, sender: MemberId, beat: Heartbeat) -> HeartbeatAnswer:
        self._check_caller(sender, "heartbeat")
        if self._is_elsewhere(sender):
            return HeartbeatAnswer(known=False)
        with self._changing() as membership:
            return membership.heartbeat(sender, beat)

    async def _goodbye(self, leaving: MemberId) -> None:
        self._check_caller(leaving, "goodbye")
        self._check_host(leaving, "goodbye")
        with self._changing() as membership:
            membership.goodbye(leaving)

    async def _child_ended(self, child: MemberId, code: int) -> None:
        self._check_caller(child, "child_ended")
        self._check_host(child, "child_ended")
        with self._changing() as membership:
            membership.child_ended(child, code)

    async def _receive_cycle(self, name: str, waited: float) -> list[str]:
        return self._cycles.ask(name, waited)

    # --- who may speak for whom ------------------------------------------------------------------------------------
    #
    # A key proves the group of a caller. All members of a group have the same key, and so have their supervisors, so within a group
    # a call is also checked against the IP address from which the member registered. Processes that share both, of one pod or of one
    # machine in a local run, cannot be told apart.

    def _check_caller(self, subject: MemberId, method: str) -> None:
        """Raise ConfigError unless the caller is `subject` or its supervisor. Without keys callers are not authenticated, and all pass."""
        caller = current_caller()
        if self.keys is None or caller is None:
            return
        if MemberId(name=caller.name, incarnation=caller.incarnation) != subject:
            raise ConfigError(f"{caller.role} {caller.name} must not call {method!r} for {subject.name}")

    def _check_host(self, subject: MemberId, method: str) -> None:
        """Raise ConfigError for a call that does not come from the host of the member `subject`."""
        if self._is_elsewhere(subject):
            raise ConfigError(
                f"{method!r} for {subject.name} must come from its own pod, got it from {current_caller_host()}"
            )

    def _is_elsewhere(self, subject: MemberId) -> bool:
        """Return whether the caller is connected from another IP address than the registered process `subject`."""
        member, host = self.get(subject.name), current_caller_host()
        return (
            self.keys is not None
            and member is not None
            and member.id == subject
            and bool(member.host)
            and member.host != host
        )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        while not self._stopped.wait(self._sweep_seconds):
            try:
                with self._changing() as membership:
                    membership.sweep()
            except Exception:  # This thread must continue, because no other one looks for silent members.
                logger.exception(
                    "the hub could not look for silent members; it looks again in %s s", self._sweep_seconds
                )

    @contextmanager
    def _changing(self) -> Iterator[Membership]:
        """Run a block that changes the membership, then report its changes: to watchers at once, to listeners on their thread."""
        with self._order:
            with self._changed:
                yield self._membership
                changes = self._membership.take_changes()
                self._changed.notify_all()
            for change in changes:
                for watcher in self._watchers:
                    self._guarded(functools.partial(watcher, change), change)
                self._queue.put(change)

    def _run_listeners(self) -> None:
        while (change := self._queue.get()) is not None:
            member = change.member
            if change.kind == "joined":
                logger.info("%s joined from pod %s (incarnation %s.%s)", member.name, member.pod, *member.incarnation)
                calls = [functools.partial(listener, member) for listener in self._joined]
            else:
                drained = member.state is MemberState.DRAINED
                level, text = (logging.INFO, "has left") if drained else (logging.WARNING, "is lost")
                logger.log(level, "%s %s: %s", member.name, text, change.reason)
                calls = [functools.partial(listener, member, change.reason) for listener in self._loss_listeners]
            for call in calls:
                self._guarded(call, change)

    def _guarded(self, call: Callable[[], object], change: Change) -> None:
        try:
            call()
        except RLJobError as error:
            logger.error("the runner's %s listener for %s failed: %s", change.kind, change.member.name, error)
        except Exception:  # A bug in one listener must not stop the others.
            logger.exception("the runner's %s listener for %s failed", change.kind, change.member.name)


def visible_groups(groups: Iterable[GroupKind]) -> dict[str, frozenset[str]]:
    """Return for each group the names of the groups whose members it sees. These are the groups that it may call."""
    all_groups = list(groups)
    return {
        viewer.name: frozenset(group.name for group in all_groups if viewer.name in group.callers)
        for viewer in all_groups
    }


def _bindable(address: str) -> str:
    """Return the address to listen on, so that other processes reach `address`.

    A loopback address is returned unchanged. For any other host, such as the service name of a pod, it is all interfaces.
    """
    host, port = split_address(address)
    return address if is_loopback(host) else f"tcp://0.0.0.0:{port}"


def _as_json(job: "RLJob | None") -> str | None:
    if job is None:
        return None
    from rl_core.api import document  # A script has no job, so it does not load the schema.

    return document.text(job)
