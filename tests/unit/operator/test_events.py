"""Events: equal ones are one with a count, a talkative job is limited, no failure reaches the reconcile. Time jumps."""

import asyncio

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Forbidden
from rljob_operator.model import JobEvent
from rljob_operator.runtime.events import BURST, REFILL_SECONDS, EventRecorder

JOB = {"metadata": {"name": "x", "namespace": "ns", "uid": "job-uid"}}
NOTE = JobEvent(type="Warning", reason="Unschedulable", message="no nodes")


class Bench:
    def __init__(self, cluster):
        self.cluster, self.dropped = cluster, []
        self.recorder = EventRecorder(
            cluster=cluster,
            identity="me",
            dropped=lambda: self.dropped.append(1),
            clock=lambda: 1e9 + asyncio.get_running_loop().time(),
        )

    async def write(self):
        task = asyncio.create_task(self.recorder.run())
        await asyncio.sleep(1)
        task.cancel()

    @property
    def events(self):
        return [obj for (kind, _, _), obj in self.cluster.objects.items() if kind == "Event"]


@pytest.fixture
def play(fake_time, cluster):
    return lambda scenario: fake_time(scenario(Bench(cluster)))


def test_an_event_names_the_job(play):
    async def scenario(bench):
        bench.recorder.record(JOB, NOTE)
        await bench.write()
        (event,) = bench.events
        assert event["involvedObject"] == {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "namespace": "ns",
            "name": "x",
            "uid": "job-uid",
        }
        assert (event["type"], event["reason"], event["message"], event["count"]) == (
            "Warning",
            "Unschedulable",
            "no nodes",
            1,
        )
        assert event["metadata"]["namespace"] == "ns"

    play(scenario)


def test_equal_events_become_one_with_a_count(play):
    async def scenario(bench):
        for _ in range(3):
            bench.recorder.record(JOB, NOTE)
        await bench.write()
        bench.recorder.record(JOB, NOTE)
        await bench.write()
        (event,) = bench.events
        assert event["count"] == 4
        assert event["lastTimestamp"] > event["firstTimestamp"]
        assert [verb for verb, _, _ in bench.cluster.calls] == ["create", "patch"]

    play(scenario)


def test_different_words_are_different_events(play):
    async def scenario(bench):
        bench.recorder.record(JOB, NOTE)
        bench.recorder.record(JOB, JobEvent(type="Warning", reason="Unschedulable", message="other words"))
        await bench.write()
        assert len(bench.events) == 2

    play(scenario)


def test_an_event_the_server_has_forgotten_is_made_anew(play):
    async def scenario(bench):
        bench.recorder.record(JOB, NOTE)
        await bench.write()
        bench.cluster.objects.clear()
        bench.recorder.record(JOB, NOTE)
        await bench.write()
        assert [event["count"] for event in bench.events] == [2]

    play(scenario)


def test_a_talkative_job_is_limited_and_may_speak_again_later(play):
    async def scenario(bench):
        for number in range(100):
            bench.recorder.record(JOB, JobEvent(type="Normal", reason="Step", message=str(number)))
        other = {"metadata": {**JOB["metadata"], "name": "y", "uid": "other"}}
        bench.recorder.record(other, NOTE)
        await bench.write()
        assert len(bench.events) == BURST + 1, "another job is not silenced by it"
        assert len(bench.dropped) == 100 - BURST
        await asyncio.sleep(REFILL_SECONDS)
        bench.recorder.record(JOB, NOTE)
        await bench.write()
        assert len(bench.events) == BURST + 2

    play(scenario)


def test_a_refused_event_is_counted_and_the_next_is_written(play):
    async def scenario(bench):
        create, refused = bench.cluster.create, []

        async def once(kind, namespace, body):
            if not refused:
                refused.append(body)
                raise Forbidden("the namespace is being terminated")
            return await create(kind, namespace, body)

        bench.cluster.create = once
        bench.recorder.record(JOB, NOTE)
        bench.recorder.record(JOB, JobEvent(type="Normal", reason="Next", message=""))
        await bench.write()
        assert [event["reason"] for event in bench.events] == ["Next"]
        assert len(bench.dropped) == 1

    play(scenario)


def test_the_kind_is_the_core_event():
    assert kinds.EVENT.path("ns") == "/api/v1/namespaces/ns/events"
