"""Lets members join the run, at its start and whenever one is replaced, and releases the resources of lost members.

    hello -> the join strategy of its worker group (`joining`) brings the member in, on a thread of its own
    lost  -> its prompt groups are requeued, and a publication in progress continues without it

No other object of the runner changes the membership. Members join concurrently: a slow one delays neither the loop nor other members.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

from rl_core.api.errors import DeadlineExceeded, InfrastructureError, RLJobError, text_of
from rl_core.api.settings import DeadlinesSpec
from rl_core.messages.members import MemberState
from rl_core.plan.groups import ROLLOUT
from rl_core.runner.joining import JoinStrategy, PullingJoin
from rl_core.runner.roster import Identity, Roster
from rl_core.runner.status import Phase, StatusBoard
from rl_core.workers.group import Cluster
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two attempts to let a live member join. When they are used up, the member is declared lost."""
LOOK = 0.25
"""Seconds between two checks of a condition that may become true without a join."""
Point = Callable[[], None]
"""Function that is called between two checks while the loop waits. It applies changes of the spec, and may raise Stopped to end the wait."""


class Members:
    """Lets members join, releases lost ones, and waits until members are present. Members of an elastic worker group join one by one."""

    def __init__(
        self,
        cluster: Cluster,
        strategies: Mapping[str, JoinStrategy],
        roster: Roster,
        board: StatusBoard,
        deadlines: DeadlinesSpec,
        *,
        fail: Callable[[RLJobError], None],
        pauses: tuple[float, ...] = RETRY_PAUSES,
    ) -> None:
        """`strategies` maps each elastic worker group to its strategy.

        `fail(error)` ends the run. It is called for errors that would occur again in a retry or in another process.
        """
        self._cluster, self._strategies, self._roster, self._board = cluster, strategies, roster, board
        self._deadlines, self._fail, self._pauses = deadlines, fail, pauses
        self._changed = threading.Condition()
        """Guards `_joining`, `_rejoining` and `_closed`; notified when one of them changes and after each join."""
        self._joining: set[str] = set()
        """Names of the members that are joining, each on a thread."""
        self._rejoining: dict[str, Member] = {}
        """Members by name that join as soon as the thread that handles this name has ended."""
        self._joined: set[Identity] = set()
        """Processes that have joined or are joining, and were not lost since."""
        self._closed = False

    # --- called by the hub, on its listener thread -------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Begin to bring in a member that has registered with the hub; returns at once."""
        if member.group not in self._strategies or member.state.gone:
            return
        with self._changed:
            if self._closed:
                return
            if member.name in self._joining:
                self._rejoining[member.name] = member
                self._changed.notify_all()
                return
            self._joining.add(member.name)
        threading.Thread(target=self._run_joins, args=(member,), name=f"join-{member.name}", daemon=True).start()

    def lost(self, member: Member, reason: str) -> None:
        """Release the resources of a lost member. If the same process returns after it was frozen or disconnected, it has to join again."""
        self._joined.discard((member.name, member.incarnation))
        if member.state is not MemberState.DRAINED:
            self._board.count_failure(member.group, "lost")
        if (strategy := self._strategies.get(member.group)) is not None:
            strategy.lost(member, reason)

    # --- joins -----------------------------------------------------------------------------------------------------

    def open(self, publisher: str) -> None:
        """Let members that pull weights complete their joins from now on. They pull from the address `publisher`."""
        for name, strategy in self._strategies.items():
            if isinstance(strategy, PullingJoin):
                strategy.publisher = publisher
                for member in self._cluster.members(name):
                    self.joined(member)

    def rejoin(self, names: list[str]) -> None:
        """Let the members `names`, which failed to apply a published version, join again and pull the weights, in the background."""
        for member in self._cluster.members():
            if member.name in names:
                self._joined.discard((member.name, member.incarnation))
                self.joined(member)

    def close(self) -> None:
        """Start no more joins. Joins in progress are not waited for; they end with the process."""
        with self._changed:
            self._closed = True
            self._rejoining.clear()
            self._changed.notify_all()

    def _run_joins(self, member: Member) -> None:
        """Bring `member` in, then a process that registered under the same name meanwhile."""
        following: Member | None = member
        while following is not None:
            self._bring_in(following)
            with self._changed:
                following = self._rejoining.pop(member.name, None)
                if following is None:
                    self._joining.discard(member.name)
                self._changed.notify_all()

    def _bring_in(self, member: Member) -> None:
        """Try to bring a member in until it has joined, is lost, or the attempts are used up."""
        failure: Exception = AssertionError("a bug: no attempt was made")
        for pause in self._pauses:
            try:
                self._bring_in_once(member)
                return
            except (InfrastructureError, DeadlineExceeded) as error:
                failure = error
                logger.warning("%s could not join: %s", member.name, error)
            except RLJobError as error:
                logger.error("%s could not join: %s", member.name, error)
                self._fail(error)
                return
            except Exception as error:  # a bug of the runner: it is logged, and ends the run if it persists
                failure = error
                logger.exception("%s could not join", member.name)
            if self._superseded(member, pause):
                return
        if isinstance(failure, RLJobError):
            # Another connection or another process may succeed. A member that is kept would be one that does nothing.
            self._cluster.hub.declare_lost(member, f"it could not join in {len(self._pauses)} attempts: {failure}")
        else:
            failed = (
                f"{member.name} could not join, the runner failed with {type(failure).__name__}: {text_of(failure)}"
            )
            self._fail(InfrastructureError(failed))

    def _superseded(self, member: Member, pause: float) -> bool:
        """Wait `pause` seconds; return whether the join is obsolete, because `member` is lost or replaced or the run ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or member.name in self._rejoining, pause)
            if self._closed or member.name in self._rejoining:
                return True
        current = self._cluster.hub.get(member.name)
        return current is None or current.state.gone or current.incarnation != member.incarnation

    def _bring_in_once(self, member: Member) -> None:
        """Bring a member in, unless it has joined already. A member that serves is never constructed again: that would drop its work."""
        process = (member.name, member.incarnation)
        if process in self._joined:
            return
        self._joined.add(
            process
            # Added before the attempt: a loss during the attempt removes the entry, so that the next hello starts another join.
        )
        complete = False
        try:
            complete = self._strategies[member.group].bring_in(member)
        finally:
            if not complete:
                self._joined.discard(process)

    # --- waits: bounded in a local run; in a cluster a shortage is not a failure and they have no bound -----------------

    def await_gangs(self, seconds: float, *, at: Point) -> None:
        """Wait until every member of every gang has constructed its worker; `at()` is called between two checks.

        Raises DeadlineExceeded after `seconds` in a local run. In a cluster there is no limit, because missing pods are replaced.
        """
        gangs = [group.name for group in self._roster.groups.values() if not group.elastic]
        if not self._roster.patient:
            self._cluster.wait_ready(gangs, seconds, on_poll=at)
            return
        while self._cluster.missing(gangs):
            at()
            self._cluster.hub.wait_changed(self._cluster.hub.revision, 1.0)

    def await_weightless(self, seconds: float, *, at: Point) -> None:
        """Wait for the elastic worker groups that load no weights, such as env.

        A local run waits for all members, and raises DeadlineExceeded after `seconds`. In a cluster it waits without limit for at least one
        member of each group, and up to deadlines.hello for the others. `at()` is called between two checks.
        """
        weightless = [name for name, strategy in self._strategies.items() if not isinstance(strategy, PullingJoin)]
        if not self._roster.patient:
            self._cluster.wait_ready(weightless, seconds, on_poll=at)
            return
        for name in weightless:
            self._wait(functools.partial(self._enough, name), at)

    def await_rollouts(self, version: int, *, begun: bool, limit: float, at: Point) -> None:
        """Wait until enough rollouts serve weights of `version`; `at()` is called between two checks.

        Once training has `begun`, rollout.minReplicas are enough. Before, all rollouts are awaited; in a cluster only those that have
        registered after deadlines.hello, but at least minReplicas. Raises DeadlineExceeded after `limit` seconds in a local run; in a
        cluster there is no limit.
        """
        roster = self._roster

        def enough(elapsed: float) -> bool:
            minimum = roster.least(ROLLOUT)
            required = (
                minimum if begun else roster.quorum(ROLLOUT, minimum, waited=elapsed, grace=self._deadlines.hello)
            )
            return roster.serving(ROLLOUT, version) >= required

        if enough(0.0):
            return
        with self._board.during(
            Phase.DEGRADED if begun else Phase.STARTING, on=ROLLOUT, what=f"to serve version {version}"
        ):
            self._wait(enough, at, None if roster.patient else limit, lambda: self._describe_rollouts(version))

    def await_group(self, name: str, *, limit: float, at: Point) -> None:
        """Wait for the members of an elastic group that loads no weights; `at()` is called between two checks.

        A local run waits for all that the job asks for, and raises DeadlineExceeded after `limit` seconds. A run in a cluster waits for as
        many as the group needs at least, without limit.
        """
        roster = self._roster

        def enough(elapsed: float) -> bool:
            return roster.count(name) >= (roster.least(name) if roster.patient else len(roster.wanted(name)))

        if enough(0.0):
            return
        with self._board.during(Phase.DEGRADED):
            self._wait(
                enough, at, None if roster.patient else limit, lambda: f"the members of {name} must be here again"
            )

    def _enough(self, group: str, elapsed: float) -> bool:
        roster = self._roster
        minimum = roster.least(group)
        return roster.count(group) >= roster.quorum(group, minimum, waited=elapsed, grace=self._deadlines.hello)

    def _wait(
        self,
        enough: Callable[[float], bool],
        at: Point,
        limit: float | None = None,
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        start = time.monotonic()
        while not enough(elapsed := time.monotonic() - start):
            at()
            if limit is not None and elapsed > limit:
                raise DeadlineExceeded(f"within {limit:.0f} s {describe()}")
            with self._changed:
                self._changed.wait(timeout=LOOK)

    def _describe_rollouts(self, version: int) -> str:
        rollouts = [f"{m.name} {m.state} (version {m.policy_version})" for m in self._cluster.members(ROLLOUT)]
        serving = self._roster.serving(ROLLOUT, version)
        return f"more rollouts must serve the present weights, got {serving}: {', '.join(rollouts) or 'none is here'}"
