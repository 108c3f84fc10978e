"""Compares the members that the applied spec asks for with those that are present: which are missing, which serve, and which leave.

Read by `/status`, by waits for members and by the dispatcher.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl_core.api.job import RLJobSpec
from rl_core.plan.groups import Group, groups_of
from rl_core.plan.slots import pod_of
from rl_core.workers.cluster import Cluster
from rl_core.workers.member import Member

LEAVING = ("draining", "drained")
PRESENT = ("ready", "serving", "updating")
"""States of a member whose worker is constructed."""

Identity = tuple[str, tuple[int, int]]
"""(member name, incarnation) of a process. A restarted process has the same name and a higher incarnation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A member that the spec asks for and that is not present."""

    name: str
    pod: str
    role: str
    since_seconds: float


class Roster:
    """The members that the job should have, and those that it has. Thread-safe."""

    def __init__(
        self,
        spec: RLJobSpec,
        cluster: Cluster,
        *,
        job: str,
        patient: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the members that `spec` asks for.

        - `job`: name of the job. The names of its pods begin with it.
        - `patient`: whether the run waits for missing members without a limit. True in a cluster, which replaces lost pods.
        """
        self.patient = patient
        self._cluster, self._job, self._clock = cluster, job, clock
        self._lock = threading.Lock()
        """Guards the fields below. No lock of the cluster is taken while it is held."""
        self._leaving: set[str] = set()
        self._absent_since: dict[str, float] = {}
        self._start = clock()
        self._seen: set[str] = set()
        self._spec = spec
        """The spec with which the run began. A running job can change the number of its pods, but not the pods themselves."""
        self._groups: Mapping[str, Group] = groups_of(spec)
        self._acked: tuple[int, frozenset[Identity]] = (-1, frozenset())

    def adopt(self, spec: RLJobSpec) -> None:
        """Apply another spec. Departures from a group whose size changed are cancelled where the new size includes the member."""
        with self._lock:
            previous, self._groups = self._groups, groups_of(spec)
            sizes = {name: group.world_size for name, group in self._groups.items()}
            changed = [name for name, size in sizes.items() if size != previous[name].world_size]
            self._leaving = {
                name for name in self._leaving if _role(name) not in changed or _rank(name) >= sizes[_role(name)]
            }

    @property
    def groups(self) -> Mapping[str, Group]:
        """Return the groups that the spec asks for, by name."""
        return self._groups

    def leave(self, names: Iterable[str]) -> None:
        """Record that these members are leaving, because the job no longer asks for them."""
        with self._lock:
            self._leaving.update(names)

    def wanted(self, role: str) -> list[str]:
        """Return the names of the members that a group should have, by the applied spec and without members that are leaving."""
        with self._lock:
            return [name for name in _names(role, self._groups[role].world_size) if name not in self._leaving]

    def pod(self, name: str) -> str:
        """Return the pod of a member."""
        return pod_of(self._spec, self._job, _role(name), _rank(name))

    def missing(self, members: Sequence[Member]) -> list[Missing]:
        """Return the members that the job should have and that are not present in `members`, with the seconds since each was first missing."""
        present = {member.name for member in members if member.state not in ("lost", *LEAVING)}
        expected = [name for role in self._groups for name in self.wanted(role)]
        now = self._clock()
        with self._lock:
            self._seen |= present
            absent = [name for name in expected if name not in present]
            self._absent_since = {
                name: self._absent_since.get(name, now if name in self._seen else self._start) for name in absent
            }
            return [
                Missing(name=name, pod=self.pod(name), role=_role(name), since_seconds=now - since)
                for name, since in self._absent_since.items()
            ]

    # --- who can work ----------------------------------------------------------------------------------------------

    def count(self, role: str) -> int:
        """Return how many members of a group have constructed their worker."""
        return sum(member.state in PRESENT for member in self._cluster.members(role))

    def acknowledged(self, version: int, processes: Iterable[Identity]) -> None:
        """Record the processes that have proved that they serve `version`. Their heartbeats may report it later."""
        self._acked = (version, frozenset(processes))

    def serving(self, role: str, version: int) -> int:
        """Return how many members of a group serve `version`, by their heartbeat or by an acknowledgement that is newer than their heartbeat.

        An acknowledgement counts for the process that gave it only: a replacement of that name has no weights yet.
        """
        acked = self._acked[1] if self._acked[0] == version else frozenset()
        return sum(
            (m.state == "serving" and m.policy_version == version) or (m.name, m.incarnation) in acked
            for m in self._cluster.members(role)
        )

    def least(self, role: str) -> int:
        """Return how many members of an elastic group a step needs: enough that minReplicas pods have one, at least one, at most all.

        It is 0 only for a group that the job gives no replicas.
        """
        group = self._groups[role]
        return max(min(group.min_members, len(self.wanted(role))), 1) if group.replicas else 0

    def short(self) -> bool:
        """Return whether a run in a cluster has too few members of an elastic group to go on."""
        elastic = [name for name, group in self._groups.items() if group.elastic]
        return self.patient and any(self.count(name) < self.least(name) for name in elastic)

    def quorum(self, role: str, least: int, *, waited: float, grace: float) -> int:
        """Return how many members of a starting group to wait for: all, or in a cluster, after `grace` seconds, those that are present."""
        num_expected = len(self.wanted(role))
        if not self.patient or waited < grace:
            return max(num_expected, least)
        return max(least, min(num_expected, len(self._cluster.members(role))))


def _names(role: str, size: int) -> list[str]:
    return [f"{role}:{rank}" for rank in range(size)]


def _role(name: str) -> str:
    return name.partition(":")[0]


def _rank(name: str) -> int:
    return int(name.partition(":")[2])
