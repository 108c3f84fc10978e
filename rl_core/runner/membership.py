"""Brings rollouts and envs into a running job, at the start and whenever one is replaced (runtime.md 3.5).

A joining rollout is constructed, builds its engine, loads the current weights from the publisher, proves the version, and only then
leases prompts.
Joins run in threads of their own and never block the loop; a join and a weight sync exclude each other.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.api.errors import DeadlineExceeded, InfrastructureError, RLJobError
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Member

logger = logging.getLogger(__name__)
RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts to bring in a member that is alive."""


class Membership:
    """Constructs members of elastic roles as they say hello."""

    def __init__(self, cluster: Cluster, groups: dict[str, WorkerGroup], *, deadline: float) -> None:
        """Act for the elastic groups in `groups` (rollout, env); each join is bounded by `deadline` seconds."""
        self._cluster = cluster
        self._groups = groups
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="join")
        self.sync_lock = threading.Lock()
        """Held by a weight sync, and by a join while it pulls weights."""
        self._turns: dict[str, threading.Lock] = {}
        self._initialised: set[tuple[str, tuple[int, int]]] = set()
        self._serving: set[tuple[str, tuple[int, int]]] = set()
        self._publisher: str | None = None
        self._start_args: tuple[Any, ...] = ()
        self._ended = threading.Event()
        self.on_failure: Callable[[RLJobError], None] = lambda error: None
        """Told what another process would fail at too: a wrong setting, an error of user or library code."""
        self.changed = threading.Condition()

    def open(self, publisher: str, start_args: tuple[Any, ...]) -> None:
        """Let rollouts join: they pull from `publisher` and are started with `start_args` (the channels)."""
        self._publisher, self._start_args = publisher, start_args
        for member in self._cluster.members("rollout"):
            self.welcome(member)

    def close(self) -> None:
        """Accept nobody any more."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def welcome(self, member: Member) -> None:
        """Begin to bring in a member that said hello (hub callback; returns at once)."""
        if member.role in ("rollout", "env") and not member.state.gone and not self._ended.is_set():
            self._pool.submit(self._bring_in, member)

    def forget(self, member: Member) -> None:
        """Note that a member is gone: should the same process come back (it was frozen or cut off), it must join anew."""
        self._serving.discard((member.name, member.incarnation))

    def _bring_in(self, member: Member) -> None:
        failure: Exception | None = None
        for pause in RETRY_PAUSES:
            try:
                with self._turn(member.name):
                    self._groups[member.role].construct(member)
                    if member.role == "rollout":
                        self._bring_rollout_in(member)
                break
            except (InfrastructureError, DeadlineExceeded) as error:
                failure = error
                logger.warning("%s could not join: %s", member.name, error)
            except RLJobError as error:
                logger.error("%s could not join: %s", member.name, error)
                self.on_failure(error)
                break
            if self._ended.wait(pause) or not self._present(member):
                break
        else:  # another connection, or another process, may do better; held on to, it would be a rollout that does nothing
            self._cluster.hub.give_up(member, f"it could not join in {len(RETRY_PAUSES)} attempts: {failure}")
        with self.changed:
            self.changed.notify_all()

    def _present(self, member: Member) -> bool:
        """Return whether the process is still the one that said hello; a replacement is welcomed by itself."""
        now = self._cluster.hub.get(member.name)
        return now is not None and not now.state.gone and now.incarnation == member.incarnation

    def _turn(self, name: str) -> threading.Lock:
        """Return the lock that lets one join of a member run at a time."""
        with self.changed:
            return self._turns.setdefault(name, threading.Lock())

    def _bring_rollout_in(self, member: Member) -> None:
        """Build the engine, and once there are weights to serve load them and start."""
        key = (member.name, member.incarnation)
        if key not in self._initialised:
            self._call(member, "init_worker")
            self._initialised.add(key)
        if self._publisher is None or key in self._serving:
            return
        with self.sync_lock:
            self._call(member, "join", self._publisher)
        self._call(member, "start_rollout", *self._start_args)
        self._serving.add(key)
        logger.info("%s serves (incarnation %s)", member.name, member.incarnation)

    def _call(self, member: Member, method: str, *args: Any) -> Any:
        return self._cluster.call(member.name, method, *args, timeout=self._deadline)

    def rejoin(self, names: list[str]) -> None:
        """Let receivers that failed a sync pull the weights again, once, in the background."""
        for member in self._cluster.members("rollout"):
            if member.name in names and not self._ended.is_set():
                self._serving.discard((member.name, member.incarnation))
                self._pool.submit(self._bring_in, member)
