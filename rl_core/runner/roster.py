"""Who should be in the run by the applied spec, who is leaving, who is here and serves, and who is missing since when.

Read by `/status`, by the waits and by the dispatcher; it decides nothing and calls nobody.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_core.api.job import RLJobSpec
from rl_core.plan.slots import pod_of
from rl_core.workers.member import Member

ROLES = ("actor", "rollout", "env")
LEAVING = ("draining", "drained")
PRESENT = ("ready", "serving", "updating")
"""States of a member that holds its worker."""

Identity = tuple[str, tuple[int, int]]
"""(member name, incarnation): one process. A restarted one has the name and nothing else of the old one."""


class MemberList(Protocol):
    """Implemented by `workers.Cluster`."""

    def members(self, role: str | None = None, *, drained: bool = False, lost: bool = False) -> list[Member]:
        """Return the members that are not gone."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A member that should be there and is not."""

    name: str
    pod: str
    role: str
    since_seconds: float


class Roster:
    """The wanted members by role beside those that are here. Any thread."""

    def __init__(
        self,
        spec: RLJobSpec,
        cluster: MemberList,
        *,
        job: str,
        patient: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Want what `spec` says; `job` begins the pods' names. `patient`: a shortage is waited out (a cluster replaces pods)."""
        self.patient = patient
        self._cluster, self._job, self._clock = cluster, job, clock
        self._lock = threading.Lock()
        """Guards what is wanted and missed; the cluster has a lock of its own, taken before this one."""
        self._leaving: set[str] = set()
        self._since: dict[str, float] = {}
        self._began = clock()
        self._seen: set[str] = set()
        self._spec = spec
        """As the run began: what it says of pods does not change."""
        self._sizes = _sizes(spec)
        self._min_rollouts = spec.rollout.min_replicas
        self._acked: tuple[int, frozenset[Identity]] = (-1, frozenset())

    def adopt(self, spec: RLJobSpec) -> None:
        """Want what another spec says. A role whose size changed takes back whom it had let go and wants again."""
        with self._lock:
            sizes = _sizes(spec)
            changed = [role for role in ROLES if sizes[role] != self._sizes[role]]
            self._sizes, self._min_rollouts = sizes, spec.rollout.min_replicas
            self._leaving = {
                name for name in self._leaving if _role(name) not in changed or _rank(name) >= sizes[_role(name)]
            }

    def leave(self, names: Iterable[str]) -> None:
        """Want these members no more."""
        with self._lock:
            self._leaving.update(names)

    def wanted(self, role: str) -> list[str]:
        """Return the names of the members a role should have."""
        with self._lock:
            return [name for name in _names(role, self._sizes[role]) if name not in self._leaving]

    def pod(self, name: str) -> str:
        """Return the pod of a member."""
        return pod_of(self._spec, self._job, _role(name), _rank(name))

    def missing(self, members: Sequence[Member]) -> list[Missing]:
        """Return the wanted members that are not among `members` or are lost, with the seconds since they were first missed."""
        here = {member.name for member in members if member.state not in ("lost", *LEAVING)}
        wanted = [name for role in ROLES for name in self.wanted(role)]
        now = self._clock()
        with self._lock:
            self._seen |= here
            absent = [name for name in wanted if name not in here]
            self._since = {name: self._since.get(name, now if name in self._seen else self._began) for name in absent}
            return [
                Missing(name=name, pod=self.pod(name), role=_role(name), since_seconds=now - since)
                for name, since in self._since.items()
            ]

    # --- who can work ----------------------------------------------------------------------------------------------

    def count(self, role: str) -> int:
        """Return how many members of a role hold their worker."""
        return sum(member.state in PRESENT for member in self._cluster.members(role))

    def acknowledged(self, version: int, processes: Iterable[Identity]) -> None:
        """Note which processes proved that they serve `version`; their heartbeats may say so later."""
        self._acked = (version, frozenset(processes))

    def serving(self, version: int) -> int:
        """Count the rollouts that serve `version`: by their own word, or by an acknowledgement that is ahead of their heartbeat.

        An acknowledgement counts for the process that gave it: the next one under its name has no weights yet.
        """
        acked = self._acked[1] if self._acked[0] == version else frozenset()
        return sum(
            (m.state == "serving" and m.policy_version == version) or (m.name, m.incarnation) in acked
            for m in self._cluster.members("rollout")
        )

    def least_rollouts(self) -> int:
        """Return how many rollouts a step needs: minReplicas, at least one, at most as many as are wanted."""
        return max(min(self._min_rollouts, len(self.wanted("rollout"))), 1)

    def short(self) -> bool:
        """Return whether a cluster gives too little to go on: no environment, or too few rollouts."""
        return self.patient and (self.count("env") < 1 or self.count("rollout") < self.least_rollouts())

    def quorum(self, role: str, least: int, *, waited: float, grace: float) -> int:
        """Return how many members of a starting role to wait for: all; in a cluster, after `grace` seconds, those that are here."""
        wanted = len(self.wanted(role))
        if not self.patient or waited < grace:
            return max(wanted, 1)
        return max(least, min(wanted, len(self._cluster.members(role))))


def _sizes(spec: RLJobSpec) -> dict[str, int]:
    return {"actor": spec.actor.world_size, "rollout": spec.rollout.replicas, "env": spec.env.replicas}


def _names(role: str, size: int) -> list[str]:
    return [f"{role}:{rank}" for rank in range(size)]


def _role(name: str) -> str:
    return name.partition(":")[0]


def _rank(name: str) -> int:
    return int(name.partition(":")[2])
