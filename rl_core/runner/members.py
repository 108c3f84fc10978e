"""Brings members into the run, at the start and whenever one is replaced, and lets go of those that are lost (runtime.md 3.5).

    hello -> construct -> init_worker -> join: pull the committed weights, prove the version -> start_rollout -> serves
    lost  -> its groups are given out again, a weight sync goes on without it

The only owner of membership in the runner. Joins run in threads of their own and never block the loop.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from rl_core.api.errors import DeadlineExceeded, InfrastructureError, RLJobError
from rl_core.api.settings import DeadlinesSpec
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAck
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.phases import Phases
from rl_core.runner.presence import Identity, Presence
from rl_core.runner.status import Phase, StatusBoard
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts to bring in a member that is alive."""
LOOK = 0.25
"""Seconds between two looks at a wait that no join wakes."""
Point = Callable[[], None]
"""A named point of the loop: raises what ends the run, applies changes of the spec."""


class Members:
    """Members of the elastic roles (rollout, env) as they come and go; the actors' gang as a whole."""

    def __init__(
        self,
        cluster: Cluster,
        groups: dict[str, WorkerGroup],
        presence: Presence,
        board: StatusBoard,
        dispatcher: Dispatcher,
        phases: Phases,
        deadlines: DeadlinesSpec,
        *,
        start_args: tuple[Any, ...],
        fail: Callable[[RLJobError], None],
        pauses: tuple[float, ...] = RETRY_PAUSES,
    ) -> None:
        """`start_args` go to `start_rollout` (the channels). `fail` ends the run: another process would fail at it too."""
        self._cluster, self._groups, self._presence, self._board = cluster, groups, presence, board
        self._dispatcher, self._phases, self._deadlines, self._start_args = dispatcher, phases, deadlines, start_args
        self._fail, self._pauses = fail, pauses
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="join")
        self.sync_lock = threading.Lock()
        """Held by a weight sync, and by a join while it pulls weights: a joiner must not pull a version that is being replaced."""
        self._changed = threading.Condition()
        """Guards `_turns`; notified after each join."""
        self._turns: dict[str, threading.Lock] = {}
        self._initialised: set[Identity] = set()
        self._started: set[Identity] = set()
        """Members that are being brought in, or were, and have not been lost since."""
        self._publisher: str | None = None
        self._ended = threading.Event()

    # --- told by the hub, on its callback thread ---------------------------------------------------------------------

    def welcome(self, member: Member) -> None:
        """Begin to bring in a member that said hello; returns at once."""
        if member.role in ("rollout", "env") and not member.state.gone and not self._ended.is_set():
            self._pool.submit(self._bring_in, member)

    def lost(self, member: Member, reason: str) -> None:
        """Let go of a member: should the same process come back (it was frozen or cut off), it must join anew."""
        self._started.discard((member.name, member.incarnation))
        if member.state is not MemberState.DRAINED:
            self._board.count_failure(member.role, "lost")
        if member.role == "rollout":
            self._dispatcher.owner_lost(member.name, member.incarnation)
            self._groups["actor"].execute_on(0).receiver_lost(member.name, reason)

    # --- joins -----------------------------------------------------------------------------------------------------

    def open(self, publisher: str) -> None:
        """Let rollouts join from here on: they pull from `publisher`."""
        self._publisher = publisher
        for member in self._cluster.members("rollout"):
            self.welcome(member)

    def rejoin(self, names: list[str]) -> None:
        """Let receivers that failed a sync pull the weights again, once, in the background."""
        for member in self._cluster.members("rollout"):
            if member.name in names and not self._ended.is_set():
                self._started.discard((member.name, member.incarnation))
                self._pool.submit(self._bring_in, member)

    def close(self) -> None:
        """Accept nobody any more."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bring_in(self, member: Member) -> None:
        failure: Exception | None = None
        for pause in self._pauses:
            try:
                with self._turn(member.name):
                    self._bring_in_once(member)
                break
            except (InfrastructureError, DeadlineExceeded) as error:
                failure = error
                logger.warning("%s could not join: %s", member.name, error)
            except RLJobError as error:
                logger.error("%s could not join: %s", member.name, error)
                self._fail(error)
                break
            if self._ended.wait(pause) or not self._is_same(member):
                break
        else:  # another connection, or another process, may do better; held on to, it would be a rollout that does nothing
            self._cluster.hub.give_up(member, f"it could not join in {len(self._pauses)} attempts: {failure}")
        with self._changed:
            self._changed.notify_all()

    def _is_same(self, member: Member) -> bool:
        """Return whether the process is still the one that said hello; a replacement is welcomed by itself."""
        now = self._cluster.hub.get(member.name)
        return now is not None and not now.state.gone and now.incarnation == member.incarnation

    def _turn(self, name: str) -> threading.Lock:
        """Return the lock that lets one join of a member run at a time."""
        with self._changed:
            return self._turns.setdefault(name, threading.Lock())

    def _bring_in_once(self, member: Member) -> None:
        """Bring a member in, unless it is: it is welcomed at its hello and again when weights are there.

        Of a member that serves, `construct` would end what it does: it begins an epoch anew.
        """
        key = (member.name, member.incarnation)
        if key in self._started:
            return
        self._started.add(key)  # first: a loss meanwhile takes it back, and the welcome after it finds it gone
        started = False
        room = self._phases.joining(member.name) if member.role == "rollout" else nullcontext()
        try:
            with room:
                self._groups[member.role].construct(member)
                started = member.role != "rollout" or self._start_rollout(member)
        finally:
            if not started:
                self._started.discard(key)

    def _start_rollout(self, member: Member) -> bool:
        """Build the engine, and once there are weights to serve load them and start; return whether there are."""
        key = (member.name, member.incarnation)
        if key not in self._initialised:
            self._call(member, "init_worker")
            self._initialised.add(key)
        if self._publisher is None:
            return False
        with self.sync_lock:
            joined: ReceiverAck = self._call(member, "join", self._publisher)
        self._dispatcher.serves([key], joined.version)
        self._call(member, "start_rollout", *self._start_args)
        logger.info("%s serves (incarnation %s)", member.name, member.incarnation)
        return True

    def _call(self, member: Member, method: str, *args: Any) -> Any:
        return self._cluster.call(member.name, method, *args, timeout=self._deadlines.wait_ready)

    # --- waits: a local run bounds each; in a cluster shortage is no failure and they have no bound (protocol.md 4) -----

    def await_actors(self, seconds: float, *, at: Point) -> None:
        """Wait until the whole gang holds its workers, with `at()` between two looks. Raises DeadlineExceeded in a local run."""
        if not self._presence.patient:
            self._cluster.wait_ready(["actor"], seconds)
            return
        while self._cluster.missing(["actor"]):
            at()
            self._cluster.hub.wait_changed(self._cluster.hub.version, 1.0)

    def await_envs(self, seconds: float, *, at: Point) -> None:
        """Wait for the environments: all of them, or in a cluster one and those that show up within deadlines.hello."""
        if not self._presence.patient:
            self._cluster.wait_ready(["env"], seconds)
            return
        grace = self._deadlines.hello
        self._wait(
            lambda waited: self._presence.count("env") >= self._presence.quorum("env", 1, waited=waited, grace=grace),
            at,
        )

    def await_rollouts(self, version: int, *, begun: bool, limit: float, at: Point) -> None:
        """Wait until enough rollouts serve `version`: minReplicas once training has `begun`, else all (in a cluster those that show up).

        Raises DeadlineExceeded after `limit` seconds in a local run.
        """
        presence = self._presence

        def enough(waited: float) -> bool:
            least = presence.least_rollouts()
            wanted = least if begun else presence.quorum("rollout", least, waited=waited, grace=self._deadlines.hello)
            return presence.serving(version) >= wanted

        if enough(0.0):
            return
        with self._board.during(Phase.DEGRADED if begun else Phase.STARTING):
            self._wait(enough, at, None if presence.patient else limit, lambda: self._who_serves(version))

    def _wait(
        self,
        enough: Callable[[float], bool],
        at: Point,
        limit: float | None = None,
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        began = time.monotonic()
        while not enough(waited := time.monotonic() - began):
            at()
            if limit is not None and waited > limit:
                raise DeadlineExceeded(f"within {limit:.0f} s {describe()}")
            with self._changed:
                self._changed.wait(timeout=LOOK)

    def _who_serves(self, version: int) -> str:
        found = ", ".join(f"{m.name} {m.state} (version {m.policy_version})" for m in self._cluster.members("rollout"))
        return f"more rollouts must serve the present weights, got {self._presence.serving(version)}: {found or 'none is here'}"
