"""The state of a run as `/status` shows it: phase, step, metrics, members, waits. The loop writes it, any thread reads it."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from statistics import fmean
from typing import Any

from rl_core.api.embodied import is_embodied
from rl_core.api.job import RLJobSpec
from rl_core.api.user_code import place_of_main_thread
from rl_core.channel import ChannelStats
from rl_core.messages.members import DISK_SPACE
from rl_core.plan.groups import ACTOR, ROLLOUT, Group
from rl_core.runner.history import now_text
from rl_core.runner.roster import LEAVING, PRESENT, Missing, Roster
from rl_core.runner.stall import StallDetector, Wait
from rl_core.workers.group import Cluster
from rl_core.workers.member import Member


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
"""Metrics that engines report with their heartbeats, and for each the function that combines the values of all rollouts."""
WAITS_FOR = {
    Phase.GENERATING: ROLLOUT,
    Phase.VALIDATING: ROLLOUT,
    Phase.TRAINING: ACTOR,
    Phase.SYNCING: ROLLOUT,
    Phase.DEGRADED: ROLLOUT,
}
"""The group that the loop of a built-in program waits for, by phase."""
UNWATCHED = frozenset({Phase.STARTING, Phase.FINISHED, Phase.FAILED, Phase.SUSPENDED})
"""Phases in which no stall is detected. The startup has deadlines of its own."""


class StatusBoard:
    """The current state of the run. Thread-safe."""

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
        reasons = {name: group.stall_reason for name, group in roster.groups.items()}
        self._stall = StallDetector(
            spec.failure_policy.stall.seconds, reasons=reasons, program_place=place_of_main_thread
        )
        self._phase = Phase.STARTING
        self._waits_on = self._waits_for = ""
        self._phase_since = time.monotonic()
        self._loop_progress = 0
        self._progress_shown = 0
        self._fields: dict[str, Any] = {
            "schema": 1,
            "epoch": epoch,
            "step": 0,
            "totalSteps": spec.algorithm.steps,
            **({} if is_embodied(spec) else {"promptsPerStep": spec.algorithm.prompts_per_step}),
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
        self.pending_wait: Callable[[], Wait | None] = lambda: None
        """Returns the group call that the loop waits for. It is reported where the loop has not named what it waits for."""
        self._channels: list[dict[str, Any]] = []
        self._unwritten: tuple[str, float] | None = None
        """(what is to be written, time.monotonic() at which the wait for disk space began); None without such a wait."""

    def adopt(self, spec: RLJobSpec, generation: int) -> None:
        """Apply a changed spec. `generation` is the job's metadata.generation that has this spec."""
        self._roster.adopt(spec)
        self.set(totalSteps=spec.algorithm.steps, appliedGeneration=generation)

    @property
    def phase(self) -> Phase:
        """Return the current phase."""
        return self._phase

    @contextmanager
    def during(self, phase: Phase, *, on: str | None = None, what: str = "") -> Iterator[None]:
        """Set the phase while the block runs, then restore the previous one.

        `on` is the group that the loop waits for during the block; None means the one in WAITS_FOR. `what` says what it waits for; ""
        means the name of the phase.
        """
        previous = self._enter(phase, WAITS_FOR.get(phase, "") if on is None else on, what)
        try:
            yield
        finally:
            self._enter(*previous)

    def _enter(self, phase: Phase, on: str = "", what: str = "") -> tuple[Phase, str, str]:
        with self._lock:
            previous = self._phase, self._waits_on, self._waits_for
            self._phase, self._waits_on, self._waits_for, self._phase_since = phase, on, what, time.monotonic()
            self._loop_progress += 1
            if Phase.DEGRADED in (previous[0], phase):
                self._stall.reset()
            return previous

    def set(self, **facts: Any) -> None:
        """Set fields of `/status`, given by their names there. Counts as progress of the run."""
        with self._lock:
            self._fields.update(facts, lastProgress=now_text())
            self._loop_progress += 1

    def fact(self, name: str) -> Any:
        """Return the value of one field that `set` can change."""
        with self._lock:
            return self._fields[name]

    def wait_for_space(self, what: str | None) -> None:
        """Show that the run waits for disk space to write `what`, until this is called with None."""
        with self._lock:
            if what is None:
                self._unwritten = None
            elif self._unwritten is None or self._unwritten[0] != what:
                self._unwritten = what, time.monotonic()

    def count_failure(self, role: str, kind: str) -> None:
        """Count a failure as `failures_total{role,kind}`."""
        with self._lock:
            failures = self._fields["failures"]
            failures[f"{role}/{kind}"] = failures.get(f"{role}/{kind}", 0) + 1

    def totals(self) -> dict[str, float]:
        """Return metrics of the step that come from the members and from this board.

        They are `failures_total/<role>/<kind>`, `weights/lag_max`, counters of environments and rollouts, and the metrics of engines.
        """
        members = list(self._cluster.members())
        with self._lock:
            failures = {f"failures_total/{name}": float(count) for name, count in self._fields["failures"].items()}
        groups = self._roster.groups
        lag = max(self._role(group, members, self._roster.wanted(name))["lag"] for name, group in groups.items())
        counters: dict[str, float] = {}
        for member in members:
            counts = member.role in groups and not groups[member.role].holds_model
            for name, value in member.metrics.items():
                if counts or name.endswith("_total"):
                    counters[name] = counters.get(name, 0.0) + float(value)
        reported: dict[str, list[float]] = {}
        for member in members:
            for name in GENERATION.keys() & member.metrics.keys():
                reported.setdefault(name, []).append(float(member.metrics[name]))
        engines = {name: float(GENERATION[name](values)) for name, values in reported.items()}
        return failures | {"weights/lag_max": float(lag)} | counters | engines

    def end(self, phase: Phase, failure: Mapping[str, Any] | None = None) -> None:
        """Enter a final phase."""
        self._enter(phase)
        self.set(failure=dict(failure) if failure else None, completionTime=now_text())

    def step_took(self, seconds: float) -> None:
        """Record the duration of a step in seconds. The default limit for stalls depends on the durations of steps."""
        self._stall.step_took(seconds)

    def show_channels(self, stats: Iterable[ChannelStats]) -> None:
        """Show these channels from now on."""
        self._channels = [
            {"name": s.name, "depth": s.depth, "oldestAge": round(s.oldest_age_seconds, 3)} for s in stats
        ]

    def snapshot(self) -> dict[str, Any]:
        """Return the fields of `/status` that every program has. Programs add further ones, such as the ledger."""
        groups = self._roster.groups
        expected = {name: self._roster.wanted(name) for name in groups}
        present, members, missing, waits = self._look(expected)
        stall = self._stall_report(present, missing, waits)
        with self._lock:
            fields = dict(self._fields)
        saved = int(fields["checkpoint"].get("lastStep") or 0)
        fields["checkpoint"] = {**fields["checkpoint"], "lag": fields["step"] - saved}
        return fields | {
            "phase": self._phase.value,
            "roles": [self._role(group, present, expected[name]) for name, group in groups.items()],
            "members": [_member(member, groups.get(member.role)) for member in members],
            "waits": [wait.as_status() for wait in waits],
            "channels": self._channels,
            "missing": [
                {"name": m.name, "pod": m.pod, "role": m.role, "since": round(m.since_seconds, 1)} for m in missing
            ],
            "stall": stall,
        }

    def stall(self) -> dict[str, Any] | None:
        """Return the stall as `/status` shows it; None while the run makes progress."""
        present, _, missing, waits = self._look({name: self._roster.wanted(name) for name in self._roster.groups})
        return self._stall_report(present, missing, waits)

    def _look(
        self, expected: Mapping[str, Sequence[str]]
    ) -> tuple[list[Member], list[Member], list[Missing], list[Wait]]:
        """Return four lists: present members, members to show, missing members, and waits.

        The members to show are the present ones and those lost members that the spec still asks for.
        """
        names = {name for of_role in expected.values() for name in of_role}
        members = [m for m in self._cluster.members(drained=True, lost=True) if m.state != "lost" or m.name in names]
        present = [m for m in members if m.state != "lost"]
        return present, members, self._roster.missing(present), self._waits(members)

    def _stall_report(self, present: list[Member], missing: list[Missing], waits: list[Wait]) -> dict[str, Any] | None:
        with self._lock:
            progress = self._loop_progress + int(sum(sum(m.progress.values()) for m in present))
            if self._phase in UNWATCHED:
                self._stall.reset()
            absent = [m.name for m in missing] if self._phase in (Phase.STARTING, Phase.DEGRADED) else []
            if progress != self._progress_shown:
                self._progress_shown, self._fields["lastProgress"] = progress, now_text()
            return self._stall.report(progress, waits, missing_pods=absent, present=self._waited_for(present))

    def _role(self, group: Group, members: Sequence[Member], expected: Sequence[str]) -> dict[str, Any]:
        alive = [m for m in members if m.role == group.name and m.state not in ("lost", *LEAVING)]
        ready = [m for m in alive if m.state in PRESENT]
        desired = len(expected)
        versions: dict[str, int] = {}
        for member in alive:
            if member.policy_version is None:
                continue
            versions[str(member.policy_version)] = versions.get(str(member.policy_version), 0) + 1
        current = self._fields["policyVersion"]
        lag = (
            max((current - m.policy_version for m in ready if m.policy_version is not None), default=0)
            if group.pulls_weights
            else 0
        )
        return {
            "name": group.name,
            "desired": desired,
            "ready": len(ready),
            "lost": max(desired - len(alive), 0),
            "versions": versions if group.pulls_weights else {},
            "lag": max(lag, 0),
        }

    def _waited_for(self, members: Sequence[Member]) -> list[str]:
        """Return the names of the members that the loop waits for.

        These are the serving members of all groups that pull weights; in the phase Degraded they are the members of these groups that do not
        serve. If the loop waits for a group that does not hold the model, the members of that group with a worker are added.
        """
        groups, staying = self._roster.groups, [m for m in members if m.state not in LEAVING]
        pulling = [m for m in staying if m.role in groups and groups[m.role].pulls_weights]
        serving = [m.name for m in pulling if (m.state == "serving") is not (self._phase is Phase.DEGRADED)]
        pending = None if self._waits_on else self.pending_wait()
        on = pending.on if pending is not None else self._waits_on
        named = on in groups and not groups[on].holds_model
        return [*serving, *(m.name for m in staying if named and m.role == on and m.state in PRESENT)]

    def _waits(self, members: Sequence[Member]) -> list[Wait]:
        """Return the edges of the waits-for graph: silent members, which may be the cause of others, declared waits, and waits of the runner."""
        edges = [
            Wait(who="hub", on=m.name, what="heartbeat", since_seconds=self._clock() - m.last_seen)
            for m in members
            if m.state in ("suspect", "lost")
        ]
        edges += [
            Wait(who=m.name, on=m.wait.on, what=m.wait.what, since_seconds=m.wait.since_seconds, cause=m.wait.cause)
            for m in members
            if m.wait and m.state not in ("lost", "drained")
        ]
        if self._waits_on:
            seconds = time.monotonic() - self._phase_since
            what = self._waits_for or self._phase.value.lower()
            edges.append(Wait(who="runner", on=self._waits_on, what=what, since_seconds=seconds))
        elif (pending := self.pending_wait()) is not None:
            edges.append(pending)
        if (unwritten := self._unwritten) is not None:
            seconds = time.monotonic() - unwritten[1]
            edges.append(Wait(who="runner", on=DISK_SPACE, what=unwritten[0], since_seconds=seconds))
        return edges


def _member(member: Member, group: Group | None) -> dict[str, Any]:
    """Return a member as `/status` shows it. `group` is None if the job has no such group."""
    is_lost, pulls = member.state == "lost", group is not None and group.pulls_weights
    return {
        "pod": member.pod,
        "name": member.name,
        "role": member.role,
        "index": member.rank,
        "state": _public_state(member, pulls=pulls),
        "detail": member.state,
        "policyVersion": None if is_lost else member.policy_version,
        "weightsProof": None if is_lost else member.weights_proof or None,
        "deviceUuids": [] if is_lost else list(member.device_uuids),
        "generation": {} if is_lost or not pulls else _generation(member),
    }


def _public_state(member: Member, *, pulls: bool) -> str:
    """Return the state of a member for users: joining, updating, serving, draining, drained or lost.

    The hub's state `ready` means that the worker is constructed. If the group `pulls` weights, the member has none yet and is joining;
    otherwise it is serving. The hub's state `suspect`, of a silent member, is updating: it gets no new work.
    """
    ready = "joining" if pulls else "serving"
    return {"constructing": "joining", "ready": ready, "suspect": "updating"}.get(member.state, str(member.state))


def _generation(member: Member) -> dict[str, float]:
    """Return the metrics of a member's engine, by their names without the prefix."""
    return {name.partition("/")[2]: value for name, value in member.metrics.items() if name in GENERATION}
