"""The operator before an API server that says no: whatever it refuses, no request is repeated faster than a back-off allows.

Controller, applier, queue and `reconcile` are the real ones; time jumps. The faults stay for the whole run, as an operator meets them:
a quota, a field that cannot change, a finalizer of someone else, a name that is taken, errors of the server, a rival that writes the
status too, and a runner that words each refusal anew.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rljob_operator import kinds
from rljob_operator.errors import ApiError, Conflict, Forbidden, Invalid, Unavailable
from rljob_operator.kinds import Kind
from rljob_operator.model import ControlCall, JobEvent, Object, Progress
from rljob_operator.naming import LABEL_JOB, LABEL_JOB_UID
from rljob_operator.reconcile import reconcile
from rljob_operator.runtime.app import PROJECTIONS
from rljob_operator.runtime.apply import Applier
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.control_calls import ControlCalls
from rljob_operator.runtime.controller import Controller
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.queue import WorkQueue
from tests.unit.operator.fake_cluster import FakeCluster
from tests.unit.operator.simulator import CONFIG, START, make_job
from tests.unit.operator.states import PHASES, UID, Dice, spec

KEY = JobKey("team", "x")
SECONDS = 200.0
POLL = 5.0
MOST_REPEATS = 24
"""Times that one request may be made in vain in SECONDS: the queue grants ten turns at once, then pauses that double up to 30 s."""
MOST_READS = 2 * int(SECONDS / POLL)
"""Reads of one object: a look in between may need fresh facts."""


class StubbornCluster(FakeCluster):
    """Refuses what it was told to refuse, for ever; keeps what was asked in vain."""

    def __init__(self, refusals: Mapping[tuple[str, str], type[ApiError]], *, held: bool, rival: bool) -> None:
        super().__init__()
        self.refusals, self.held, self.rival = refusals, held, rival
        self.in_vain: collections.Counter[tuple[str, str, str]] = collections.Counter()

    def _called(self, verb: str, kind: Kind, name: str) -> None:
        super()._called(verb, kind, name)
        if verb in ("read", "list"):
            self.in_vain[verb, kind.kind, name] += 1
        if (refused := self.refusals.get((verb, kind.kind))) is not None:
            self.in_vain[verb, kind.kind, name] += 1
            raise refused(f"{name}: no")

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        if self.rival:
            self.in_vain["patch", kind.kind, name] += 1
            self.put(kind, namespace, self._get(kind, namespace, name))
            raise Conflict("the object has been modified")
        return await super().patch(kind, namespace, name, body, **more)

    async def delete(self, kind: Kind, namespace: str, name: str, **more: Any) -> dict[str, Any]:
        if not self.held:
            return await super().delete(kind, namespace, name, **more)
        self._called("delete", kind, name)
        found = self._get(kind, namespace, name)
        if "deletionTimestamp" in found["metadata"]:
            self.in_vain["delete", kind.kind, name] += 1
            return found
        meta = {**found["metadata"], "deletionTimestamp": "2025-06-15T15:06:40Z", "finalizers": ["someone.else/holds"]}
        return self.put(kind, namespace, {**found, "metadata": meta})


class Contrary:
    """A runner that refuses every call in other words."""

    def __init__(self) -> None:
        self.words = map(str, itertools.count())

    async def call(self, job_uid: str, call: ControlCall) -> str:
        return next(self.words)


class Recorder:
    """Counts events: each is a write."""

    def __init__(self) -> None:
        self.events: collections.Counter[tuple[str, str]] = collections.Counter()

    def record(self, job: Object, event: JobEvent) -> None:
        self.events[event.reason, event.message] += 1


def secret(job: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x-keys"}}


async def live(
    cluster: StubbornCluster, job: dict[str, Any], pods: list[dict[str, Any]], told: dict[str, Any]
) -> Recorder:
    """Serve one job for SECONDS; the runner's word is new at each poll."""
    loop, recorder = asyncio.get_running_loop(), Recorder()
    cache = Cache(projections=PROJECTIONS, clock=loop.time)

    def clock() -> float:
        return START + loop.time()

    calls = ControlCalls(
        client=Contrary(),
        answered=lambda key, *answer: queue.add(key) if controller.set_answer(key, *answer) else None,
    )
    applier = Applier(
        cluster=cluster,
        cache=cache,
        slots=FairSlots(total=8, per_key=4),
        recorder=recorder,
        calls=calls,
        build_secret=secret,
        clock=clock,
    )
    controller = Controller(
        cluster=cluster, cache=cache, applier=applier, reconcile=reconcile, config=CONFIG, clock=clock
    )
    queue: WorkQueue[JobKey] = WorkQueue(expected=(ApiError,), jitter=lambda: 0.5)
    cache.put(kinds.RLJOB, cluster.put(kinds.RLJOB, "team", job))
    for pod in pods:
        cache.put(kinds.POD, cluster.put(kinds.POD, "team", pod))
    queue.add(KEY)
    serving = asyncio.gather(queue.run(controller.handle, workers=1), calls.run())
    for step in range(int(SECONDS / POLL)):
        await asyncio.sleep(POLL)
        uid = cluster.objects.get(("Pod", "team", "x-actor-0"), {"metadata": {"uid": ""}})["metadata"]["uid"]
        controller.set_progress(KEY, UID, Progress(status={**told, "step": step}, at=clock(), pod_uid=uid))
        queue.add(KEY)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return recorder


REFUSED = st.dictionaries(
    st.sampled_from(
        [
            ("create", "Pod"),
            ("create", "Secret"),
            ("apply", "Service"),
            ("apply", "ConfigMap"),
            ("apply", "NetworkPolicy"),
            ("delete", "Pod"),
            ("patch", "RLJob"),
        ]
    ),
    st.sampled_from([Forbidden, Invalid, Unavailable]),
    max_size=3,
)


@settings(
    max_examples=40,
    phases=[Phase.generate],  # a smaller failure would take minutes to find
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(refusals=REFUSED, held=st.booleans(), rival=st.booleans(), data=st.binary(min_size=192, max_size=192))
def test_nothing_is_repeated_in_vain_faster_than_its_back_off(
    fake_time: Callable[..., Any],
    refusals: Mapping[tuple[str, str], type[ApiError]],
    held: bool,
    rival: bool,
    data: bytes,
) -> None:
    dice = Dice(data)
    job = make_job(UID) | {"spec": spec(dice.number(0, 63))}
    job["metadata"]["generation"] = 2
    epoch = dice.number(1, 2)
    job["status"] = {"phase": dice.one(PHASES), "epoch": epoch, "begunEpoch": epoch, "step": 3}
    pods = [
        pod_of(role, index, epoch, dice) for role, index in (("actor", 0), ("rollout", 3), ("env", 0)) if dice.maybe()
    ]
    cluster = StubbornCluster(refusals, held=held, rival=rival)
    told = {"phase": "Training", "epoch": epoch, "appliedGeneration": 1, "members": []}
    recorder = fake_time(live(cluster, job, pods, told))
    for request, times in cluster.in_vain.items():
        assert times <= (MOST_READS if request[0] in ("read", "list") else MOST_REPEATS), (request, times)
    assert max(recorder.events.values(), default=0) <= MOST_REPEATS, recorder.events.most_common(3)


def pod_of(role: str, index: int, epoch: int, dice: Dice) -> dict[str, Any]:
    """Return a pod of the job that runs, or has ended."""
    name = f"x-{role}-{index}"
    labels = {LABEL_JOB: "x", LABEL_JOB_UID: UID, "rljob.dev/role": role, "rljob.dev/index": str(index)}
    labels["rljob.dev/epoch"] = str(epoch)
    ended = {"terminated": {"exitCode": dice.one((1, 3, 0)), "reason": "Error", "message": ""}}
    status = {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "containerStatuses": [{"name": role, "state": dice.one(({"running": {}}, ended))}],
    }
    meta = {"name": name, "labels": labels, "ownerReferences": [{"kind": "RLJob", "uid": UID}]}
    meta |= {"creationTimestamp": "2025-06-15T15:00:00Z", "finalizers": ["someone.else/holds"]}
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": status}
