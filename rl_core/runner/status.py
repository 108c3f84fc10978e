"""What the run tells about itself: phase, step, metrics, members, waits. Read by `/status`, written by the loop and the hub."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from statistics import fmean
from typing import Any

from rl_core.api.job import RLJobSpec
from rl_core.channel import ChannelStats
from rl_core.runner.history import now_text
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.roster import LEAVING, PRESENT, Roster
from rl_core.runner.stall import StallDetector, Wait
from rl_core.workers.group import Cluster


class Phase(StrEnum):
    """STARTING -> (GENERATING -> TRAINING -> SYNCING -> VALIDATING | CHECKPOINTING)* -> FINISHED | FAILED | SUSPENDED; DEGRADED while short."""

    STARTING = "Starting"
    GENERATING = "Generating"
    TRAINING = "Training"
    SYNCING = "Syncing"
    VALIDATING = "Validating"
    CHECKPOINTING = "Checkpointing"
    DEGRADED = "Degraded"
    FINISHED = "Finished"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


GENERATION: Mapping[str, Callable[[Sequence[float]], float]] = {
    "rollout/tokens_per_second": sum,
    "rollout/running": sum,
    "rollout/waiting": sum,
    "rollout/kv_use": max,
    "rollout/queue_seconds": max,
    "rollout/prefix_hit_share": fmean,
}
"""What the rollouts' engines tell with their heartbeats, and how it becomes one number of the step; `/status` has it by rollout."""
MOST_GROUPS = 256
"""Groups shown in `/status` at most, those that come first in the ledger's order."""
UNWATCHED = frozenset({Phase.STARTING, Phase.FINISHED, Phase.FAILED, Phase.SUSPENDED})
"""Phases without a stall bound: bring-up has deadlines of its own."""


class StatusBoard:
    """The run's present state; any thread may read it."""

    def __init__(
        self,
        spec: RLJobSpec,
        cluster: Cluster,
        roster: Roster,
        *,
        epoch: int,
        failures: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the run of `spec` on `cluster` under `epoch`; `failures` were counted before it, `clock` is the hub's."""
        self._clock = clock
        self._roster = roster
        self._cluster = cluster
        self._lock = threading.Lock()
        self._stall = StallDetector(spec.failure_policy.stall.seconds)
        self._phase = Phase.STARTING
        self._phase_since = time.monotonic()
        self._loop_progress = 0
        self._progress_shown = 0
        self._facts: dict[str, Any] = {
            "schema": 1,
            "epoch": epoch,
            "step": 0,
            "totalSteps": spec.algorithm.steps,
            "policyVersion": 0,
            "reward": None,
            "metrics": {},
            "checkpoint": {},
            "failures": dict(failures or {}),
            "failure": None,
            "startTime": now_text(),
            "lastProgress": now_text(),
            "appliedGeneration": 0,
            "suspended": False,
            "streaks": {},
        }
        self._channels: list[dict[str, Any]] = []

    def adopt(self, spec: RLJobSpec, generation: int) -> None:
        """Describe the run as another spec wants it, from `generation` of the job on."""
        self._roster.adopt(spec)
        self.set(totalSteps=spec.algorithm.steps, appliedGeneration=generation)

    @property
    def phase(self) -> Phase:
        """Return the present phase."""
        return self._phase

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` while the block runs, then in the one before."""
        before = self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, phase: Phase) -> Phase:
        with self._lock:
            before, self._phase, self._phase_since = self._phase, phase, time.monotonic()
            self._loop_progress += 1
            if Phase.DEGRADED in (before, phase):
                self._stall.reset()
            return before

    def set(self, **facts: Any) -> None:
        """Change facts, names as in `/status`."""
        with self._lock:
            self._facts.update(facts, lastProgress=now_text())
            self._loop_progress += 1

    def fact(self, name: str) -> Any:
        """Return one fact as set."""
        with self._lock:
            return self._facts[name]

    def count_failure(self, role: str, kind: str) -> None:
        """Count a failure of a role (`failures_total{role,kind}`)."""
        with self._lock:
            failures = self._facts["failures"]
            failures[f"{role}/{kind}"] = failures.get(f"{role}/{kind}", 0) + 1

    def totals(self) -> dict[str, float]:
        """Return `failures_total/<role>/<kind>`, `weights/lag_max` and what environments, rollouts and engines count, for the step's metrics."""
        members = list(self._cluster.members())
        with self._lock:
            failures = {f"failures_total/{name}": float(count) for name, count in self._facts["failures"].items()}
        lag = self._role("rollout", members)["lag"]
        own: dict[str, float] = {}
        for member in members:
            for name, value in member.metrics.items():
                if member.role == "env" or name.endswith("_total"):
                    own[name] = own.get(name, 0.0) + float(value)
        told: dict[str, list[float]] = {}
        for member in members:
            for name in GENERATION.keys() & member.metrics.keys():
                told.setdefault(name, []).append(float(member.metrics[name]))
        engines = {name: float(GENERATION[name](values)) for name, values in told.items()}
        return failures | {"weights/lag_max": float(lag)} | own | engines

    def end(self, phase: Phase, failure: Mapping[str, Any] | None = None) -> None:
        """Enter a final phase."""
        self._enter(phase)
        self.set(failure=dict(failure) if failure else None, completionTime=now_text())

    def step_took(self, seconds: float) -> None:
        """Remember a step's duration for the stall bound."""
        self._stall.step_took(seconds)

    def show_channels(self, stats: Iterable[ChannelStats]) -> None:
        """Show these channels from now on."""
        self._channels = [
            {"name": s.name, "depth": s.depth, "oldestAge": round(s.oldest_age_seconds, 3)} for s in stats
        ]

    def snapshot(self, ledger: Mapping[str, float], held: Sequence[HeldGroup]) -> dict[str, Any]:
        """Return `/status`; `ledger` are its metrics, `held` the groups that are not final."""
        known = list(self._cluster.members(drained=True, lost=True))
        members = [m for m in known if m.state != "lost"]
        missing = self._roster.missing(members)
        with self._lock:
            progress = self._loop_progress + int(sum(sum(m.progress.values()) for m in members))
            if self._phase in UNWATCHED:
                self._stall.reset()
            short = [m.name for m in missing] if self._phase in (Phase.STARTING, Phase.DEGRADED) else []
            stall = self._stall.report(
                progress, self._waits(known), missing_pods=short, present=self._waited_for(members)
            )
            if progress != self._progress_shown:
                self._progress_shown, self._facts["lastProgress"] = progress, now_text()
            facts = dict(self._facts)
        saved = int(facts["checkpoint"].get("lastStep") or 0)
        facts["checkpoint"] = {**facts["checkpoint"], "lag": facts["step"] - saved}
        return facts | {
            "phase": self._phase.value,
            "roles": [self._role(role, members) for role in ("actor", "rollout", "env")],
            "members": [
                {
                    "pod": m.pod,
                    "name": m.name,
                    "role": m.role,
                    "index": m.rank,
                    "state": _public_state(m),
                    "detail": m.state,
                    "policyVersion": None if m.state == "lost" else m.policy_version,
                    "weightsProof": None if m.state == "lost" else m.weights_proof or None,
                    "deviceUuids": [] if m.state == "lost" else list(m.device_uuids),
                    "generation": _generation(m),
                }
                for m in known
                if m.state != "lost" or m.name in self._roster.wanted(m.role)
            ],
            "waits": [
                {"who": w.who, "on": w.on, "what": w.what, "seconds": round(w.since_seconds, 1)}
                for w in self._waits(known)
            ],
            "ledger": {**ledger, "groups": [_group(one) for one in held[:MOST_GROUPS]]},
            "channels": self._channels,
            "missing": [
                {"name": m.name, "pod": m.pod, "role": m.role, "since": round(m.since_seconds, 1)} for m in missing
            ],
            "stall": stall,
        }

    def _role(self, role: str, members: list[Any]) -> dict[str, Any]:
        alive = [m for m in members if m.role == role and m.state not in ("lost", *LEAVING)]
        ready = [m for m in alive if m.state in PRESENT]
        desired = len(self._roster.wanted(role))
        versions: dict[str, int] = {}
        for member in alive:
            if member.policy_version is None:
                continue
            versions[str(member.policy_version)] = versions.get(str(member.policy_version), 0) + 1
        current = self._facts["policyVersion"]
        lag = (
            max((current - m.policy_version for m in ready if m.policy_version is not None), default=0)
            if role == "rollout"
            else 0
        )
        return {
            "name": role,
            "desired": desired,
            "ready": len(ready),
            "lost": max(desired - len(alive), 0),
            "versions": versions if role == "rollout" else {},
            "lag": max(lag, 0),
        }

    def _waited_for(self, members: list[Any]) -> list[str]:
        """Return the rollouts that the loop counts on: those that serve, while it is short of them those that do not."""
        here = [m for m in members if m.role == "rollout" and m.state not in LEAVING]
        return [m.name for m in here if (m.state == "serving") is not (self._phase is Phase.DEGRADED)]

    def _waits(self, known: list[Any]) -> list[Wait]:
        """Return the waits-for graph: silent members first, as they are at the root, then declared waits and the runner's own phase."""
        edges = [
            Wait(who="hub", on=m.name, what="heartbeat", since_seconds=self._clock() - m.last_seen)
            for m in known
            if m.state == "suspect" or (m.state == "lost" and m.name in self._roster.wanted(m.role))
        ]
        edges += [
            Wait(
                who=m.name,
                on=m.wait.on,
                what=m.wait.what,
                since_seconds=m.wait.since_seconds,
            )
            for m in known
            if m.wait and m.state not in ("lost", "drained")
        ]
        on = {
            Phase.GENERATING: "rollout",
            Phase.VALIDATING: "rollout",
            Phase.TRAINING: "actor",
            Phase.SYNCING: "rollout",
            Phase.DEGRADED: "rollout",
        }.get(self._phase)
        if on is not None:
            edges.append(
                Wait(
                    who="runner",
                    on=on,
                    what=self._phase.value.lower(),
                    since_seconds=time.monotonic() - self._phase_since,
                )
            )
        return edges


def _public_state(member: Any) -> str:
    """Return a member's state as `/status` names it; `detail` has the hub's.

    A rollout that holds its worker still lacks weights; an actor or env then works. A silent one gets no new work.
    """
    ready = "joining" if member.role == "rollout" else "serving"
    return {"constructing": "joining", "ready": ready, "suspect": "updating"}.get(member.state, str(member.state))


def _generation(member: Any) -> dict[str, float]:
    """Return what a rollout's engine is doing; empty for other roles, and for one that is lost."""
    if member.role != "rollout" or member.state == "lost":
        return {}
    return {name.partition("/")[2]: value for name, value in member.metrics.items() if name in GENERATION}


def _group(held: HeldGroup) -> dict[str, Any]:
    """Return who holds a group since when; no owner once its record is on the way to training."""
    return {
        "id": held.group_id,
        "state": held.state.value,
        "owner": held.owner or None,
        "seconds": round(held.seconds, 1),
        "attempt": held.attempt,
    }
