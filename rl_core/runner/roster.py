"""Who should be in the run by the applied spec, who is leaving, and who is missing since when. Read by `/status` and by the waits."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.api.job import RLJobSpec

ROLES = ("actor", "rollout", "env")
LEAVING = ("draining", "drained")
PRESENT = ("ready", "serving", "updating")
"""States of a member that holds its worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A member that should be there and is not."""

    name: str
    pod: str
    role: str
    since_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as `/status` tells it."""
        return {"name": self.name, "pod": self.pod, "role": self.role, "since": round(self.since_seconds, 1)}


class Roster:
    """The wanted members by role. Any thread."""

    def __init__(self, spec: RLJobSpec, *, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Want what `spec` says; `job` begins the pods' names."""
        self._job, self._clock = job, clock
        self._lock = threading.Lock()
        self._leaving: set[str] = set()
        self._since: dict[str, float] = {}
        self._began = clock()
        self._seen: set[str] = set()
        self._per_pod = spec.actor.processes_per_pod
        self._sizes = _sizes(spec)

    def adopt(self, spec: RLJobSpec) -> None:
        """Want what another spec says. A role whose size changed takes back whom it had let go and wants again."""
        with self._lock:
            sizes = _sizes(spec)
            changed = [role for role in ROLES if sizes[role] != self._sizes[role]]
            self._sizes = sizes
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
        role, rank = _role(name), _rank(name)
        return f"{self._job}-{role}-{rank // self._per_pod if role == 'actor' else rank}"

    def missing(self, members: Sequence[Any]) -> list[Missing]:
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


def _sizes(spec: RLJobSpec) -> dict[str, int]:
    return {"actor": spec.actor.world_size, "rollout": spec.rollout.replicas, "env": spec.env.replicas}


def _names(role: str, size: int) -> list[str]:
    return [f"{role}:{rank}" for rank in range(size)]


def _role(name: str) -> str:
    return name.partition(":")[0]


def _rank(name: str) -> int:
    return int(name.partition(":")[2])
