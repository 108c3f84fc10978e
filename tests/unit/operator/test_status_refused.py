"""A status that the API server refuses: the plan goes on without it, the next plans are made from it, and it is sent again ever later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_operator import kinds
from rljob_operator.errors import ApiError, Conflict, Forbidden, Invalid, Unavailable, error_of
from rljob_operator.model import JobEvent, Object, Progress
from rljob_operator.reconcile import reconcile
from rljob_operator.runtime.app import PROJECTIONS
from rljob_operator.runtime.apply import Applier
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.controller import Controller
from rljob_operator.runtime.fairness import FairSlots
from tests.unit.operator.fake_cluster import FakeCluster
from tests.unit.operator.simulator import CONFIG, START, make_job

KEY = JobKey("team", "x")
UID = "0f9d2c1e-0000"
NO = 'RLJob.rljob.dev "x" is invalid: status.checkpoint.time: Too long'
PODS = ["x-actor-0", "x-env-0", "x-rollout-0", "x-rollout-1"]


class Calls:
    """Keeps the calls of the newest plan."""

    def __init__(self) -> None:
        self.newest: list[str] = []

    def send(self, key: JobKey, job_uid: str, calls: Any) -> None:
        self.newest = [f"{call.method} {call.body}" for call in calls]


class Events:
    """Keeps all events."""

    def __init__(self) -> None:
        self.all: list[JobEvent] = []

    def record(self, job: Object, event: JobEvent) -> None:
        self.all.append(event)

    def of(self, reason: str) -> list[str]:
        return [event.message for event in self.all if event.reason == reason]


class Bench:
    """The operator without its queue, before an API server that refuses each status with `refusal`."""

    def __init__(self, **spec: Any) -> None:
        self.cluster, self.calls, self.events, self.now = FakeCluster(), Calls(), Events(), START
        self.refusal: ApiError | None = Invalid(NO)
        self.tried: list[float] = []
        """Times of attempts to write the status, in seconds since START."""
        self.cluster.patch = self._patched(self.cluster.patch)  # type: ignore[method-assign]
        self.cache = Cache(projections=PROJECTIONS)
        self.controller = self.start()
        self.put_job({**make_job(UID, **spec), "status": {}})

    def start(self) -> Controller:
        """Return a controller that has just started."""
        applier = Applier(
            cluster=self.cluster,
            cache=self.cache,
            slots=FairSlots(total=8, per_key=4),
            recorder=self.events,
            calls=self.calls,
            build_secret=lambda job: {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x-keys"}},
            clock=lambda: self.now,
        )
        return Controller(
            cluster=self.cluster,
            cache=self.cache,
            applier=applier,
            reconcile=reconcile,
            config=CONFIG,
            clock=lambda: self.now,
        )

    def _patched(self, patch: Any) -> Any:
        async def refuse(*words: Any, **more: Any) -> Any:
            self.tried.append(self.now - START)
            if self.refusal is not None:
                raise self.refusal
            return await patch(*words, **more)

        return refuse

    def put_job(self, job: Object) -> None:
        self.cache.put(kinds.RLJOB, self.cluster.put(kinds.RLJOB, "team", job))

    def edit(self, **spec: Any) -> None:
        """Change the spec as a user does."""
        job = self.cluster.objects["RLJob", "team", "x"]
        meta = {**job["metadata"], "generation": job["metadata"]["generation"] + 1}
        self.put_job({**job, "metadata": meta, "spec": {**job["spec"], **spec}})

    @property
    def status(self) -> dict[str, Any]:
        """The status that is stored."""
        return self.cluster.objects["RLJob", "team", "x"]["status"]  # type: ignore[no-any-return]

    @property
    def pods(self) -> list[str]:
        return self.cluster.of(kinds.POD)

    async def look(self, *, times: int = 6) -> float | None:
        """Reconcile some times; return the seconds that the last reconcile asks for."""
        for _ in range(times):
            again = await self.controller.handle(KEY)
        return again

    def run_pods(self, **ended: int) -> None:
        """Have all pods run, but those that ended with an exit code: role=code."""
        for name in self.pods:
            pod = self.cluster.objects["Pod", "team", name]
            role = name.split("-")[1]
            state = {"terminated": {"exitCode": ended[role]}} if role in ended else {"running": {}}
            containers = [{"name": role, "state": state, "ready": role not in ended}]
            pod["metadata"].setdefault("creationTimestamp", "2025-06-15T15:00:00Z")
            pod |= {"status": {"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": containers}}
            pod["spec"]["nodeName"] = "n1"
            self.cache.put(kinds.POD, self.cluster.put(kinds.POD, "team", pod))

    def report(self, **status: Any) -> None:
        """Have the runner report."""
        uid = self.cluster.objects["Pod", "team", "x-actor-0"]["metadata"]["uid"]
        reported = {"phase": "Training", "epoch": 1, "members": [], **status}
        self.controller.set_progress(KEY, UID, Progress(status=reported, at=self.now, pod_uid=uid))


@pytest.fixture
async def running() -> Bench:
    """A job that trains, whose status is stored up to now."""
    bench = Bench()
    bench.refusal = None
    await bench.look()
    bench.run_pods()
    bench.report(step=3)
    await bench.look()
    assert (bench.status["phase"], bench.pods) == ("Running", PODS)
    bench.refusal = Invalid(NO)
    bench.tried.clear()
    bench.events.all.clear()
    return bench


@pytest.mark.parametrize(
    "refusal",
    [
        Invalid(NO),
        Forbidden("rljobs.rljob.dev is forbidden: no right to patch rljobs/status"),
        error_of(500, json.dumps({"message": 'failed calling webhook "v.example": 500'}).encode(), retry_after=None),
        error_of(413, b'{"message": "Request entity too large"}', retry_after=None),
    ],
    ids=["422", "403", "webhook", "413"],
)
async def test_the_pods_of_a_job_are_created_without_it_and_an_event_tells_why(refusal: ApiError) -> None:
    bench = Bench()
    bench.refusal = refusal
    await bench.look()
    assert bench.pods == PODS and bench.status == {}
    (message,) = bench.events.of("StatusRefused")
    assert refusal.message in message


async def test_it_is_sent_again_with_a_back_off_whatever_changes_meanwhile(running: Bench) -> None:
    for second in range(700):
        running.now = START + 100 + second
        running.report(step=4 + second)
        await running.look(times=2)
    assert [at - 100 for at in running.tried] == [0, 1, 3, 7, 15, 31, 63, 127, 255, 511]
    assert len(running.events.of("StatusRefused")) == len(running.tried)
    assert running.status["step"] == 3


async def test_the_newest_one_is_written_when_its_time_has_come(running: Bench) -> None:
    running.now += 100
    running.report(step=7)
    pause = await running.look()
    assert pause == 1.0
    running.refusal = None
    await running.look()
    assert running.status["step"] == 3, "not before the pause is over"
    running.now += 60
    running.report(step=8)
    await running.look()
    tried = len(running.tried)
    await running.look()
    assert running.status["step"] == 8 and len(running.tried) == tried


async def test_it_is_written_though_nothing_changes_any_more(running: Bench) -> None:
    running.now += 100
    running.report(step=7)
    pause = await running.look()
    running.refusal = None
    running.now += pause or 0.0
    await running.look(times=1)
    assert running.status["step"] == 7


async def test_one_that_was_written_although_the_response_was_lost_is_not_refused_any_more(running: Bench) -> None:
    running.now += 100
    running.report(step=7)
    pause = await running.look()
    running.now += pause or 0.0
    write = running.cluster.patch

    async def lose_response(*words: Any, **more: Any) -> Any:
        running.cluster.patch = write  # type: ignore[method-assign]
        running.refusal = None
        await write(*words, **more)
        raise Conflict("the object has been modified")

    running.cluster.patch = lose_response  # type: ignore[method-assign]
    await running.look(times=1)
    assert running.status["step"] == 7
    assert running.controller._memories[KEY].refused_status is None


async def test_a_job_is_suspended_though_its_runner_does_not_end(running: Bench) -> None:
    """The time at which the suspension began is part of the status."""
    running.edit(suspend=True)
    await running.look()
    assert running.pods == PODS and running.calls.newest == ["POST /finish {'reason': 'suspend'}"]
    running.now += 3600
    await running.look()
    assert running.pods == [] and running.status["phase"] == "Running"
    assert [event.reason for event in running.events.all if event.reason.startswith("Suspend")] == [
        "Suspending",
        "Suspended",
    ]


async def test_a_job_ends_at_its_deadline(running: Bench) -> None:
    running.edit(activeDeadlineSeconds=60, deletionPolicy={"onFailure": "DeletePods"})
    running.now += 120
    await running.look()
    assert running.pods == [] and len(running.events.of("Failed")) == 1
    assert not list(running.controller.runners())


async def test_a_gang_is_restarted_as_the_next_attempt_once(running: Bench) -> None:
    running.run_pods(actor=1)
    await running.look()
    running.now += 600  # the back-off of the restart
    await running.look()
    pod = running.cluster.objects["Pod", "team", "x-actor-0"]
    assert pod["metadata"]["labels"]["rljob.dev/epoch"] == "2"
    assert len(running.events.of("Restarting")) == 1


async def test_an_operator_that_starts_meanwhile_goes_on_from_the_pods(running: Bench) -> None:
    running.run_pods(actor=1)
    await running.look()
    running.now += 600
    await running.look()
    running.controller = running.start()
    await running.look()
    labels = running.cluster.objects["Pod", "team", "x-actor-0"]["metadata"]["labels"]
    assert (running.pods, labels["rljob.dev/epoch"]) == (PODS, "2")


async def test_an_api_server_that_does_not_answer_stops_the_plan_as_ever() -> None:
    bench = Bench()
    bench.refusal = Unavailable("no answer")
    with pytest.raises(Unavailable):
        await bench.look()
    assert bench.pods == [] and bench.events.all == []
