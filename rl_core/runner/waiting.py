"""Waits for members. In a local run each has the job's bound; in a cluster shortage is no failure and the wait has none (protocol.md 4).

A wait in a cluster ends by the members that come, by a stop request, or by what `startDeadlineSeconds`, `activeDeadlineSeconds` and
the stall rule make the operator do. `/status.missing` says whom and since when.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from rl_core.api.errors import DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.runner.membership import Membership
from rl_core.runner.roster import PRESENT
from rl_core.runner.status import Phase, StatusBoard
from rl_core.workers.group import Cluster, WorkerGroupFuncResult

logger = logging.getLogger(__name__)
PATIENCE = 30 * 86400.0
"""Seconds of a call that may outlast any shortage."""
LOOK = 0.25
"""Seconds between two looks at a wait that members do not wake."""
SLICE = 1.0


class Attendance:
    """Knows who serves, and waits for those that are missing."""

    def __init__(
        self,
        spec: Callable[[], RLJobSpec],
        cluster: Cluster,
        board: StatusBoard,
        membership: Membership,
        *,
        patient: bool,
        check: Callable[[], None],
        at_boundary: Callable[[], None],
    ) -> None:
        """`spec()` is the spec as applied; `patient`: without bounds, in a cluster.

        `check` raises what ended the run from outside; `at_boundary` applies changes while nothing is computed.
        """
        self._spec, self._cluster, self._board, self._membership = spec, cluster, board, membership
        self.patient = patient
        self._check, self._at_boundary = check, at_boundary

    # --- bring-up --------------------------------------------------------------------------------------------------

    def await_actors(self, seconds: float) -> None:
        """Wait until the whole gang holds its workers. Raises DeadlineExceeded after `seconds` in a local run."""
        if not self.patient:
            self._cluster.wait_ready(["actor"], seconds)
            return
        while self._cluster.missing(["actor"]):
            self._check()
            self._cluster.hub.wait_changed(self._cluster.hub.version, SLICE)

    def await_envs(self, seconds: float) -> None:
        """Wait for the environments: all of them, or in a cluster one and those that show up within deadlines.hello."""
        if not self.patient:
            self._cluster.wait_ready(["env"], seconds)
            return
        self._wait(lambda waited: self._count("env") >= self._quorum("env", 1, waited))

    def await_rollouts(self, serving: Callable[[], int], *, begun: bool, limit: float) -> None:
        """Wait until enough rollouts serve: minReplicas once training has `begun`, else all (in a cluster those that show up).

        Raises DeadlineExceeded after `limit` seconds in a local run.
        """

        def enough(waited: float) -> bool:
            rollout = self._spec().rollout
            least = max(min(rollout.min_replicas, len(self._board.roster.wanted("rollout"))), 1)
            return serving() >= (least if begun else self._quorum("rollout", least, waited))

        if not enough(0.0):
            with self._board.during(Phase.DEGRADED if begun else Phase.STARTING):
                self._wait(enough, None if self.patient else limit, lambda: self._serving_text(serving()))

    def _quorum(self, role: str, least: int, waited: float) -> int:
        """Return how many members of a starting role to wait for: all, after deadlines.hello in a cluster those that are here."""
        wanted = len(self._board.roster.wanted(role))
        if not self.patient or waited < self._spec().runtime.deadlines.hello:
            return max(wanted, 1)
        return max(least, min(wanted, len(self._cluster.members(role))))

    def _wait(
        self, enough: Callable[[float], bool], limit: float | None = None, told: Callable[[], str] = lambda: ""
    ) -> None:
        began = time.monotonic()
        while not enough(waited := time.monotonic() - began):
            self._check()
            self._at_boundary()
            if limit is not None and waited > limit:
                raise DeadlineExceeded(f"within {limit:.0f} s {told()}")
            with self._membership.changed:
                self._membership.changed.wait(timeout=LOOK)

    def _serving_text(self, count: int) -> str:
        members = ", ".join(
            f"{m.name} {m.state} (version {m.policy_version})" for m in self._cluster.members("rollout")
        )
        return f"more rollouts must serve the present weights, got {count}: {members or 'none is here'}"

    # --- in a step -------------------------------------------------------------------------------------------------

    def short(self) -> bool:
        """Return whether a cluster gives too little to go on: no environment, or fewer rollouts than minReplicas and one."""
        if not self.patient:
            return False
        least = max(min(self._spec().rollout.min_replicas, len(self._board.roster.wanted("rollout"))), 1)
        return self._count("env") < 1 or self._count("rollout") < least

    def await_groups(
        self, receiving: WorkerGroupFuncResult, wait: Callable[[WorkerGroupFuncResult, float], list[Any]], limit: float
    ) -> list[Any]:
        """Return what `wait(receiving, seconds)` returns within `limit` seconds.

        In a cluster times of shortage are Degraded; afterwards the limit begins anew, as the groups do. Raises DeadlineExceeded.
        """
        if not self.patient:
            return wait(receiving, limit)
        left = limit
        while left > 0:
            if self.short():
                with self._board.during(Phase.DEGRADED):
                    while self.short():
                        self._at_boundary()
                        if (answer := _within_slice(receiving, wait)) is not None:
                            return answer
                left = limit
            began = time.monotonic()
            if (answer := _within_slice(receiving, wait)) is not None:
                return answer
            left -= time.monotonic() - began
        try:
            return wait(receiving, 0.0)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"a step's groups must arrive within deadlines.rollout {limit:.0f} s: {error}"
            ) from error

    def _count(self, role: str) -> int:
        return sum(member.state in PRESENT for member in self._cluster.members(role))


def _within_slice(
    receiving: WorkerGroupFuncResult, wait: Callable[[WorkerGroupFuncResult, float], list[Any]]
) -> list[Any] | None:
    """Return the results if they come within SLICE, else None; raises what a rank raised."""
    began = time.monotonic()
    try:
        return wait(receiving, SLICE)
    except DeadlineExceeded:
        if receiving.done() or time.monotonic() - began < SLICE:  # a rank's own deadline, not the end of the slice
            raise
        return None
