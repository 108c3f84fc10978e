"""How a new member joins an elastic worker group: one strategy for groups without weights, one for groups that pull weights.

WeightlessJoin    construct -> ready
PullingJoin       construct -> build the engine -> pull and prove the committed version -> serve

To prove a version means to report the digest of the weights that the member has loaded and checked.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.messages.members import Incarnation
from rl_core.messages.weights import ReceiverAck
from rl_core.plan.groups import ACTOR, ROLLOUT, GroupKind
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.roster import Identity
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
Release = Callable[[str, Incarnation], object]
"""Function that releases the resources of a lost process. Its arguments are the name and the incarnation of the process."""
PULLS_AT_ONCE = 32
"""Largest number of members that pull weights at the same time. With more, the bandwidth of each would be too small to meet the deadline."""


class JoinStrategy(ABC):
    """The way in which the members of one worker group join the run."""

    def __init__(self, group: WorkerGroup) -> None:
        """`group` is the worker group; it constructs the worker of each member."""
        self.group = group

    @abstractmethod
    def bring_in(self, member: Member) -> bool:
        """Let `member` join the run. Blocks, and returns whether it has joined. Raises RLJobError if that fails.

        False means that no weights were published yet. `Members.open` repeats the call as soon as they are.
        """

    @abstractmethod
    def lost(self, member: Member, reason: str) -> None:
        """Release what the runner holds for a lost member."""


class WeightlessJoin(JoinStrategy):
    """For worker groups without weights, such as env: a member has joined when its worker is constructed."""

    def bring_in(self, member: Member) -> bool:
        """Construct the worker."""
        self.group.construct(member)
        return True

    def lost(self, member: Member, reason: str) -> None:
        """Do nothing: the runner holds nothing for such a member."""


class PullingJoin(JoinStrategy):
    """For groups that hold the policy: a member has joined when it has loaded and proved the committed version of the weights."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        cluster: Cluster,
        actor: WorkerGroup,
        versions: MemberVersions,
        release: Release,
        schedule: DeviceSchedule,
        seconds: float,
        start_args: tuple[Any, ...],
    ) -> None:
        """`release` gives back what the runner holds for a lost process.

        Each call to a member takes at most `seconds`. `start_args` are passed to its `start_serving`."""
        super().__init__(group)
        self._cluster, self._actor, self._versions = cluster, actor, versions
        self._release, self._schedule = release, schedule
        self._seconds, self._start_args = seconds, start_args
        self._pulls = threading.BoundedSemaphore(PULLS_AT_ONCE)
        self._built: set[Identity] = set()
        """Processes whose engine is built. A process that is declared lost and comes back still has it."""
        self.publisher: str | None = None
        """Address from which weights are pulled; None before the first version is published."""

    def bring_in(self, member: Member) -> bool:
        """Construct the worker, build its engine, pull the weights if there are any yet, and start it; return whether it serves."""
        process = (member.name, member.incarnation)
        self.group.construct(member)
        if process not in self._built:
            with self._schedule.joining(member.name):
                self._call(member, "init_worker")
            self._built.add(process)
        if self.publisher is None:
            return False
        version = self._pull(member, process, self.publisher)
        self._call(member, "start_serving", *self._start_args)
        while not self._versions.await_current(process, timeout=self._seconds):
            version = self._pull(member, process, self.publisher)
        logger.info("%s serves version %s (incarnation %s)", member.name, version, member.incarnation)
        return True

    def lost(self, member: Member, reason: str) -> None:
        """Requeue the prompt groups of the member, and let a publication in progress continue without it."""
        process = (member.name, member.incarnation)
        self._versions.forget(process)
        self._release(*process)
        self._actor.execute_on(0).receiver_lost(member.name, reason)

    def _pull(self, member: Member, process: Identity, publisher: str) -> int:
        """Have the member pull and prove the committed version of the weights; return the version."""
        try:
            with self._schedule.joining(member.name), self._pull_slot():
                joined: ReceiverAck = self._call(member, "join", publisher)
        except InfrastructureError:
            # A publication that begins after the first pull sends the member a newer version, which ends a pull under way.
            version = self._versions.version_of(process)
            if version is None or not self._versions.await_current(process, timeout=self._seconds):
                raise
            return version
        self._versions.proved([process], joined.version)
        return joined.version

    @contextmanager
    def _pull_slot(self) -> Iterator[None]:
        if not self._pulls.acquire(timeout=self._seconds):
            raise DeadlineExceeded(f"one of {PULLS_AT_ONCE} pulls must end within {self._seconds:.0f} s")
        try:
            yield
        finally:
            self._pulls.release()

    def _call(self, member: Member, method: str, *args: Any) -> Any:
        return self._cluster.call(member.name, method, *args, timeout=self._seconds)


def build_strategies(
    kinds: Iterable[GroupKind],
    groups: Mapping[str, WorkerGroup],
    *,
    cluster: Cluster,
    versions: MemberVersions,
    release: Release,
    schedule: DeviceSchedule,
    seconds: float,
    start_args: tuple[Any, ...],
) -> dict[str, JoinStrategy]:
    """Return the join strategy of each elastic worker group by name.

    `start_args`, the channels, are passed to the `start_serving` of rollouts. A gang has no strategy: its members are constructed
    together when all are present.
    """
    strategies: dict[str, JoinStrategy] = {}
    for kind in kinds:
        if kind.pulls_weights:
            strategies[kind.name] = PullingJoin(
                groups[kind.name],
                cluster=cluster,
                actor=groups[ACTOR],
                versions=versions,
                release=release,
                schedule=schedule,
                seconds=seconds,
                start_args=start_args if kind.name == ROLLOUT else (),
            )
        elif kind.elastic:
            strategies[kind.name] = WeightlessJoin(groups[kind.name])
    return strategies
