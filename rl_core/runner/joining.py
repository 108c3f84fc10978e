"""How a new member of an elastic group comes into the run: one strategy for each kind of group.

plain            construct -> ready
pulls weights    construct -> build the engine -> pull and prove the committed version -> serve
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.messages.weights import ReceiverAck
from rl_core.plan.groups import ACTOR, GroupKind
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.handover import VersionHandover
from rl_core.runner.roster import Identity
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
PULLS_AT_ONCE = 32
"""Members of a group that pull weights at the same time. More of them would share the publisher's network and all be late."""


class JoinStrategy(ABC):
    """Brings the members of one group in."""

    def __init__(self, group: WorkerGroup) -> None:
        """`group` constructs the worker of a member."""
        self.group = group

    @abstractmethod
    def bring_in(self, member: Member) -> bool:
        """Bring `member` in, blocking; return whether it is in. One that is not is brought in later, when weights are there."""

    @abstractmethod
    def lost(self, member: Member, reason: str) -> None:
        """Release what the run holds for a member that is lost."""


class PlainJoin(JoinStrategy):
    """A member of this kind is in once its worker is constructed."""

    def bring_in(self, member: Member) -> bool:
        """Construct the worker."""
        self.group.construct(member)
        return True

    def lost(self, member: Member, reason: str) -> None:
        """Do nothing: the run holds nothing for the member."""


class PullingJoin(JoinStrategy):
    """A member of this kind loads and proves the committed weights before it gets work."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        cluster: Cluster,
        actor: WorkerGroup,
        versions: VersionHandover,
        dispatcher: Dispatcher,
        schedule: DeviceSchedule,
        seconds: float,
        start_args: tuple[Any, ...],
    ) -> None:
        """`seconds` bounds each call to a member. `start_args` go to its `start_rollout` (the channels)."""
        super().__init__(group)
        self._cluster, self._actor, self._versions = cluster, actor, versions
        self._dispatcher, self._schedule = dispatcher, schedule
        self._seconds, self._start_args = seconds, start_args
        self._pulls = threading.BoundedSemaphore(PULLS_AT_ONCE)
        self._built: set[Identity] = set()
        """Processes whose engine is built. It stays when a process is taken for lost and comes back."""
        self.publisher: str | None = None
        """Address from which weights are pulled; None before the first version is published."""

    def bring_in(self, member: Member) -> bool:
        """Construct the worker and build its engine; once there are weights to pull, pull them and start. Return whether it serves."""
        process = (member.name, member.incarnation)
        self.group.construct(member)
        if process not in self._built:
            with self._schedule.joining(member.name):
                self._call(member, "init_worker")
            self._built.add(process)
        if self.publisher is None:
            return False
        version = self._pull(member, process, self.publisher)
        self._call(member, "start_rollout", *self._start_args)
        while not self._versions.is_current(process, timeout=self._seconds):
            version = self._pull(member, process, self.publisher)
        logger.info("%s serves version %s (incarnation %s)", member.name, version, member.incarnation)
        return True

    def lost(self, member: Member, reason: str) -> None:
        """Give the groups of samples of the member to others, and let a publication under way go on without it."""
        process = (member.name, member.incarnation)
        self._versions.forget(process)
        self._dispatcher.owner_lost(*process)
        self._actor.execute_on(0).receiver_lost(member.name, reason)

    def _pull(self, member: Member, process: Identity, publisher: str) -> int:
        """Have the member pull and prove the committed version; return it."""
        try:
            with self._schedule.joining(member.name), self._pull_slot():
                joined: ReceiverAck = self._call(member, "join", publisher)
        except InfrastructureError:
            # A publication that begins after the first pull sends the member a newer version, which ends a pull under way.
            version = self._versions.version_of(process)
            if version is None or not self._versions.is_current(process, timeout=self._seconds):
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
    versions: VersionHandover,
    dispatcher: Dispatcher,
    schedule: DeviceSchedule,
    seconds: float,
    start_args: tuple[Any, ...],
) -> dict[str, JoinStrategy]:
    """Return the strategy of each elastic group by name. A gang has none: its members are constructed together when all are there."""
    strategies: dict[str, JoinStrategy] = {}
    for kind in kinds:
        if kind.pulls_weights:
            strategies[kind.name] = PullingJoin(
                groups[kind.name],
                cluster=cluster,
                actor=groups[ACTOR],
                versions=versions,
                dispatcher=dispatcher,
                schedule=schedule,
                seconds=seconds,
                start_args=start_args,
            )
        elif kind.elastic:
            strategies[kind.name] = PlainJoin(groups[kind.name])
    return strategies
