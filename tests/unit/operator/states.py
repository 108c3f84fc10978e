"""Jobs, pods and runners' words that nobody planned, each made of a few bytes.

Hypothesis draws one string of bytes per state, which costs next to nothing, and shrinks it: the first option of each choice is the
plainest. Specs come from a pool, and each is understood once (`known_of`): most of a reconcile's time would go there.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from rljob_operator.model import Observed, Progress
from rljob_operator.reconcile import pod_views
from rljob_operator.reconcile.conditions import REASONS, TYPES
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.times import to_text
from tests.unit.operator.simulator import START, make_job

UID = "0f9d2c1e-0000"
NUM_SPECS = 64
PHASES = ("Pending", "Starting", "Running", "Suspending", "Suspended", "Restarting", "Succeeded", "Failed")
WORDS = (
    "",
    "Error",
    "OOMKilled",
    "Evicted",
    "x",
    '{"reason": "r", "tail": ["a"], "summary": {"step": 3, "epoch": 1}}',
    "[1",
    "{}",
)
RULES: list[dict[str, Any]] = [
    {"exitCodes": [1], "action": "RestartJob", "countTowardsLimit": False},
    {"roles": ["rollout"], "reasons": ["OOMKilled"], "action": "RestartRole"},
    {"roles": ["env", "rollout"], "podConditions": ["DisruptionTarget"], "action": "Ignore"},
    {"messagePattern": "x*y", "action": "FailJob"},
]
JUNK: tuple[Any, ...] = (
    None,
    0,
    -5,
    10**19,
    True,
    "x",
    1.5,
    float("nan"),
    [],
    {},
    [{}],
    {"": 1},
    [[None, "a"], 3],
    {"x": [{"y": -1}]},
)
T = TypeVar("T")
bytes_of_a_state = st.binary(min_size=192, max_size=192)


class Dice:
    """Choices made of a string of bytes; when it is used up the first option is taken."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)
        self._epoch = self.number(1, 3) if self.maybe() else None

    def number(self, least: int, most: int) -> int:
        """Return a whole number of a range of at most 256."""
        return least + next(self._bytes, 0) % (most - least + 1)

    def one(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[next(self._bytes, 0) % len(options)]

    def epoch(self) -> int:
        """Return an epoch; in every other state all are the same, as in most of a job's life."""
        return self._epoch if self._epoch is not None else self.number(0, 4)

    def uid(self, name: str) -> str:
        """Return a pod's uid, likewise."""
        return f"u1{name}" if self._epoch is not None or self.maybe() else f"u2{name}"

    def maybe(self, part: int = 2) -> bool:
        """Return true once in `part` times."""
        return next(self._bytes, 0) % part == part - 1

    def some(self, options: Sequence[T]) -> list[T]:
        """Return those of up to eight options whose bit is set, of more the first or the second half at random."""
        bits = next(self._bytes, 0) | next(self._bytes, 0) << 8
        return [option for index, option in enumerate(options) if bits >> index & 1]

    def time(self) -> str:
        """Return a time up to 4,000 s before or after START, also those where something is due."""
        return to_text(
            START + self.one((0, -1, 1, -15, 15, -45, -60, -120, -300, -600, 300, 4000, -4000)) + self.number(0, 3) / 2
        )


@functools.cache
def spec(index: int) -> dict[str, Any]:
    """Return one of the pool's specs."""
    draw = random.Random(index)
    made = make_job(
        UID,
        actor={"replicas": draw.randint(1, 3)},
        rollout={"replicas": draw.randint(1, 4), "minReplicas": draw.randint(0, 1)},
        algorithm={"promptsPerStep": 12},
        suspend=draw.random() < 0.2,
        failurePolicy={
            "maxRestarts": draw.randint(0, 5),
            "forgiveAfterSteps": draw.choice([1, 10, None]),
            "rules": draw.sample(RULES, draw.randint(0, 2)),
            "stall": {"action": draw.choice(["RestartRole", "RestartJob", "Pause", "FailJob"])},
            "klBlowUp": {"above": 1.0, "action": draw.choice(["RestartFromCheckpoint", "Pause", "FailJob"])},
        },
        deletionPolicy={"onSuccess": draw.choice(["KeepAll", "KeepActor", "DeletePods"])},
        runtime={"suspendSeconds": draw.choice([1, 120])},
    )["spec"]
    for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "startDeadlineSeconds"):
        if draw.random() < 0.5:
            made[field] = draw.randint(1, 5000)
    return made


@functools.cache
def _parsed(index: int) -> ParsedJob:
    return ParsedJob()


def known_of(job: dict[str, Any]) -> ParsedJob | None:
    """Return what earlier looks understood of the job's spec."""
    return _parsed(job["pool"]) if "pool" in job else None


def state(data: bytes) -> tuple[dict[str, Any], Observed]:
    """Return a job and what is there of it."""
    dice = Dice(data)
    index = dice.number(0, NUM_SPECS - 1)
    job = make_job(UID) | {"spec": spec(index), "pool": index}
    job["metadata"]["generation"] = dice.number(1, 3)
    if not dice.maybe(4):
        job["status"] = _status(dice)
    progress = _progress(dice)
    name_conflicts = dice.one(((), (), (), ("Service/x",)))
    refusals = dice.one(({}, {}, {}, {"Pod/x-env-0": "exceeded quota: q"}, {"Service/x": "denied"}))
    pods = {pod["metadata"]["name"]: pod for pod in (_pod(dice) for _ in range(dice.number(0, 8)))}
    return job, pod_views.observe(
        pods=list(pods.values()), name_conflicts=name_conflicts, refusals=refusals, progress=progress
    )


def _pod(dice: Dice) -> dict[str, Any]:
    role, index = dice.one(("actor", "actor", "rollout", "rollout", "env", "other")), dice.one((0, 0, 1, 2, 3, 4))
    owner = dice.one((UID, UID, UID, UID, "older", ""))
    status: dict[str, Any] = {"phase": dice.one(("Pending", "Running", "Running", "Succeeded", "Failed", "Unknown"))}
    status["conditions"] = [
        {
            "type": kind,
            "status": dice.one(("True", "False", "Unknown")),
            "reason": dice.one(WORDS),
            "message": dice.one(WORDS),
        }
        for kind in ("Ready", "PodScheduled", *(["DisruptionTarget"] if dice.maybe(8) else []))
    ]
    status["containerStatuses"] = _containers(dice)
    if dice.maybe(4):
        status["initContainerStatuses"] = _containers(dice)
    if dice.maybe():
        status |= {"startTime": to_text(START), "podIP": "10.0.0.9"}
    labels = {"rljob.dev/role": role, "rljob.dev/index": str(index), "rljob.dev/epoch": str(dice.epoch())}
    meta: dict[str, Any] = {
        "name": f"x-{role}-{index}",
        "uid": dice.uid(f"{role}{index}"),
        "creationTimestamp": dice.time(),
        "labels": labels,
    }
    meta |= {"ownerReferences": [{"kind": "RLJob", "uid": owner}]} if owner else {}
    meta |= {"deletionTimestamp": dice.time(), "deletionGracePeriodSeconds": dice.one((30, 0))} if dice.maybe(5) else {}
    return {"metadata": meta, "spec": {"nodeName": dice.one(("n1", ""))}, "status": status}


def _containers(dice: Dice) -> list[dict[str, Any]]:
    kind = dice.one(("running", "running", "running", "none", "terminated", "waiting"))
    state: dict[str, Any] = {} if kind == "none" else {kind: {}}
    if kind == "terminated":
        state[kind] = {
            "exitCode": dice.one((0, 1, 2, 3, 4, 137)),
            "reason": dice.one(WORDS),
            "message": dice.one(WORDS),
        }
        state[kind] |= {"finishedAt": dice.time()} if dice.maybe() else {}
    elif kind == "waiting":
        state[kind] = {"reason": dice.one(("ErrImagePull", "PodInitializing")), "message": dice.one(WORDS)}
    return [{"name": "c", "state": state}]


def _status(dice: Dice) -> dict[str, Any]:
    kinds = dice.some(TYPES)
    status = {
        "phase": dice.one(("Running", *PHASES, "Running", "Running")),
        "epoch": dice.epoch(),
        "begunEpoch": dice.epoch(),
        "restarts": dice.number(0, 4),
        "totalRestarts": dice.number(0, 6),
        "forgiveAtStep": dice.number(0, 60),
        "step": dice.number(0, 50),
        "roles": [{"name": "actor", "active": dice.number(0, 3), "restarts": dice.number(0, 3)}],
        "startTime": dice.time(),
        "completionTime": dice.time(),
        "ends": [
            {
                "name": dice.one(("actor", "stall", "x-rollout-0")),
                "uid": "u1rollout0",
                "times": [dice.time()],
                "backoffSeconds": 20,
            }
        ],
        "draining": [{"pod": "x-rollout-3", "since": dice.time()}],
        "conditions": [
            {
                "type": kind,
                "status": dice.one(("True", "False", "Unknown")),
                "reason": dice.one(sorted(REASONS[kind])),
                "message": "",
                "lastTransitionTime": dice.time(),
                "observedGeneration": dice.number(0, 3),
            }
            for kind in kinds
        ],
    }
    if dice.maybe(5):
        status["halt"] = {
            "by": dice.one(("user", "rule")),
            "generation": dice.number(0, 3),
            "since": dice.time(),
            "done": dice.maybe(),
        }
    return status


def _progress(dice: Dice) -> Progress | None:
    if dice.maybe(4):
        return None
    told: dict[str, Any] = {
        "phase": dice.one(("Training", "Starting", "Finished")),
        "epoch": dice.epoch(),
        "step": dice.number(0, 60),
        "policyVersion": dice.number(0, 60),
        "appliedGeneration": 0,
        "stall": dice.one((None, {"reason": "WaitingForEnv", "since": 500.0})),
        "streaks": {"klBlowUp": dice.number(0, 1)},
        "members": [{"pod": "x-rollout-3", "state": dice.one(("serving", "drained", "draining", "lost"))}],
    }
    for name in (
        dice.some(
            ("phase", "epoch", "step", "members", "roles", "stall", "metrics", "missing", "streaks", "checkpoint")
        )
        if dice.maybe(3)
        else ()
    ):
        told[name] = dice.one(JUNK)
    failing = START - dice.number(0, 60) if dice.maybe(3) else None
    error = "e" if failing else ""
    return Progress(
        status=told,
        at=START,
        pod_uid=dice.uid("actor0"),
        error=error,
        failing_since=failing,
        failures=dice.number(1, 2) if failing else 0,
    )
