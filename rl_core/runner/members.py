"""Brings members into the run, at the start and whenever one is replaced, and releases what lost ones held.

    hello -> the strategy of the member's group (`joining`) brings it in, in a thread of its own
    lost  -> its groups of samples are given to others, a publication goes on without it

The only owner of membership in the runner. Members come in side by side: one that is slow delays neither the loop nor other members.
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
"""Seconds between attempts to bring in a member that is alive."""
LOOK = 0.25
"""Seconds between two looks at a condition that no join changes."""
Point = Callable[[], None]
"""A point of the loop at which it may end, and at which changes of the spec are applied."""


class Members:
    """Members of elastic groups as they come and go; gangs as a whole."""

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
        """`strategies` has an entry for each elastic group. `fail` ends the run with an error that every process would meet."""
        self._cluster, self._strategies, self._roster, self._board = cluster, strategies, roster, board
        self._deadlines, self._fail, self._pauses = deadlines, fail, pauses
        self._changed = threading.Condition()
        """Guards `_joining`, `_again` and `_ended`; notified when one of them changes and after each join."""
        self._joining: set[str] = set()
        """Members that a thread is bringing in."""
        self._again: dict[str, Member] = {}
        """Members that are to be brought in once the thread that handles their name is done."""
        self._in: set[Identity] = set()
        """Processes that are in, or are being brought in, and have not been lost since."""
        self._ended = False

    # --- called by the hub, on its listener thread -------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """Begin to bring in a member that said hello; returns at once."""
        if member.group not in self._strategies or member.state.gone:
            return
        with self._changed:
            if self._ended:
                return
            if member.name in self._joining:
                self._again[member.name] = member
                self._changed.notify_all()
                return
            self._joining.add(member.name)
        threading.Thread(target=self._run_joins, args=(member,), name=f"join-{member.name}", daemon=True).start()

    def lost(self, member: Member, reason: str) -> None:
        """Release what a lost member held. Should the same process come back (it was frozen or cut off), it must join again."""
        self._in.discard((member.name, member.incarnation))
        if member.state is not MemberState.DRAINED:
            self._board.count_failure(member.group, "lost")
        if (strategy := self._strategies.get(member.group)) is not None:
            strategy.lost(member, reason)

    # --- joins -----------------------------------------------------------------------------------------------------

    def open(self, publisher: str) -> None:
        """Let members of the groups that pull weights join from here on: they pull from `publisher`."""
        for name, strategy in self._strategies.items():
            if isinstance(strategy, PullingJoin):
                strategy.publisher = publisher
                for member in self._cluster.members(name):
                    self.joined(member)

    def rejoin(self, names: list[str]) -> None:
        """Let members that failed a publication pull the weights again, in the background."""
        for member in self._cluster.members():
            if member.name in names:
                self._in.discard((member.name, member.incarnation))
                self.joined(member)

    def close(self) -> None:
        """Bring nobody in any more. Joins under way end with the process."""
        with self._changed:
            self._ended = True
            self._again.clear()
            self._changed.notify_all()

    def _run_joins(self, member: Member) -> None:
        """Bring `member` in, then whoever said hello under its name meanwhile."""
        following: Member | None = member
        while following is not None:
            self._bring_in(following)
            with self._changed:
                following = self._again.pop(member.name, None)
                if following is None:
                    self._joining.discard(member.name)
                self._changed.notify_all()

    def _bring_in(self, member: Member) -> None:
        """Try to bring a member in until it is, until it is gone, or until the attempts are used up."""
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
            self._cluster.hub.give_up(member, f"it could not join in {len(self._pauses)} attempts: {failure}")
        else:
            failed = (
                f"{member.name} could not join, the runner failed with {type(failure).__name__}: {text_of(failure)}"
            )
            self._fail(InfrastructureError(failed))

    def _superseded(self, member: Member, pause: float) -> bool:
        """Wait `pause` seconds; return whether `member` is not to be brought in any more: it is gone, or was replaced."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or member.name in self._again, pause)
            if self._ended or member.name in self._again:
                return True
        current = self._cluster.hub.get(member.name)
        return current is None or current.state.gone or current.incarnation != member.incarnation

    def _bring_in_once(self, member: Member) -> None:
        """Bring a member in, unless it is in already. A member that serves is never constructed again: that would drop its work."""
        process = (member.name, member.incarnation)
        if process in self._in:
            return
        self._in.add(
            process
        )  # before the attempt: a loss during it removes the entry, so that the next hello joins again
        complete = False
        try:
            complete = self._strategies[member.group].bring_in(member)
        finally:
            if not complete:
                self._in.discard(process)

    # --- waits: bounded in a local run; in a cluster a shortage is not a failure and they have no bound -----------------

    def await_gang(self, group: str, seconds: float, *, at: Point) -> None:
        """Wait until each member of a gang holds its worker, with `at()` between two looks. Raises DeadlineExceeded in a local run."""
        if not self._roster.patient:
            self._cluster.wait_ready([group], seconds, at=at)
            return
        while self._cluster.missing([group]):
            at()
            self._cluster.hub.wait_changed(self._cluster.hub.version, 1.0)

    def await_plain(self, seconds: float, *, at: Point) -> None:
        """Wait for the elastic groups without weights: all members, or in a cluster at least one, and those here within deadlines.hello."""
        plain = [name for name, strategy in self._strategies.items() if not isinstance(strategy, PullingJoin)]
        if not self._roster.patient:
            self._cluster.wait_ready(plain, seconds, at=at)
            return
        for name in plain:
            self._wait(functools.partial(self._enough, name), at)

    def await_rollouts(self, version: int, *, begun: bool, limit: float, at: Point) -> None:
        """Wait until enough rollouts serve `version`: minReplicas once training has `begun`, else all (in a cluster those that show up).

        Raises DeadlineExceeded after `limit` seconds in a local run.
        """
        roster = self._roster

        def enough(waited: float) -> bool:
            least = roster.least_rollouts()
            wanted = least if begun else roster.quorum(ROLLOUT, least, waited=waited, grace=self._deadlines.hello)
            return roster.serving(version) >= wanted

        if enough(0.0):
            return
        with self._board.during(Phase.DEGRADED if begun else Phase.STARTING):
            self._wait(enough, at, None if roster.patient else limit, lambda: self._describe_rollouts(version))

    def _enough(self, group: str, waited: float) -> bool:
        roster = self._roster
        return roster.count(group) >= roster.quorum(group, 1, waited=waited, grace=self._deadlines.hello)

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

    def _describe_rollouts(self, version: int) -> str:
        rollouts = [f"{m.name} {m.state} (version {m.policy_version})" for m in self._cluster.members(ROLLOUT)]
        serving = self._roster.serving(version)
        return f"more rollouts must serve the present weights, got {serving}: {', '.join(rollouts) or 'none is here'}"
