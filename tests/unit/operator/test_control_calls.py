"""Control calls to runners: hanging runners delay no reconcile and no other namespace, and only the newest calls of a job are sent."""

import asyncio

from rljob_operator import kinds
from rljob_operator.model import ControlCall, Plan
from rljob_operator.runtime.apply import Applier
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.control_calls import PER_NAMESPACE, ControlCalls
from rljob_operator.runtime.controller import Controller
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.queue import WorkQueue
from tests.unit.operator.simulator import CONFIG

DEADLINE = 6.0
"""Seconds that a call to a hanging runner takes: two requests of 3 s."""


def call(*pods, method="POST /drain"):
    return ControlCall(method=method, body={"pods": list(pods)}, ip="10.0.0.1", epoch=1)


class Runners:
    """Stands in for RunnerClient: the runners of some jobs hang."""

    def __init__(self, *hanging):
        self.hanging, self.answered, self.calls, self.present, self.most = hanging, [], [], 0, 0

    async def call(self, job_uid, sent):
        self.present += 1
        self.most = max(self.most, self.present)
        await asyncio.sleep(DEADLINE if job_uid in self.hanging else 0.01)
        self.present -= 1
        self.calls.append((asyncio.get_running_loop().time(), job_uid, sent))
        return ""

    def note(self, key, job_uid, sent, message):
        self.answered.append((key, job_uid, sent, message))


async def during(coroutine, background):
    task = asyncio.create_task(background)
    await coroutine
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_jobs_whose_runners_hang_do_not_delay_the_pods_of_another(cluster, fake_time):
    """Two workers and six jobs with calls: the pods of a seventh job are created at once."""

    async def scenario():
        names = [f"hangs-{n}" for n in range(6)]
        runners, cache, created = Runners(*names), Cache(), asyncio.Event()
        calls = ControlCalls(client=runners, answered=runners.note)

        def plan(job, observed, now, **_):
            name = job["metadata"]["name"]
            if name in names:
                return Plan(calls=(call(name),), requeue_after=0.5)
            created.set()
            return Plan()

        applier = Applier(
            cluster=cluster,
            cache=cache,
            slots=FairSlots(total=8, per_key=4),
            recorder=None,
            calls=calls,
            build_secret=lambda job: {},
        )
        controller = Controller(cluster=cluster, cache=cache, applier=applier, reconcile=plan, config=CONFIG)
        queue = WorkQueue()
        for name in (*names, "good"):
            cache.put(kinds.RLJOB, cluster.put(kinds.RLJOB, "ns", {"metadata": {"name": name, "uid": name}}))

        async def add_the_good_one():
            for name in names:
                queue.add(JobKey("ns", name))
            await asyncio.sleep(20.0)
            began = asyncio.get_running_loop().time()
            queue.add(JobKey("ns", "good"))
            await created.wait()
            assert asyncio.get_running_loop().time() - began < 0.1

        await during(
            add_the_good_one(),
            asyncio.wait([*map(asyncio.create_task, (queue.run(controller.handle, workers=2), calls.run()))]),
        )
        assert {uid for _, uid, _ in runners.calls} == set(names), "and each of the others has its turns"

    fake_time(scenario())


def test_a_namespace_of_hanging_runners_does_not_delay_the_calls_of_another(fake_time):
    async def scenario():
        names = [f"hangs-{n}" for n in range(100)]
        runners = Runners(*names)
        calls = ControlCalls(client=runners, answered=runners.note)
        for name in names:
            calls.send(JobKey("hostile", name), name, (call(name),))
        calls.send(JobKey("other", "good"), "good", (call("good"),))
        await during(asyncio.sleep(5.0), calls.run())
        assert [uid for _, uid, _ in runners.calls] == ["good"]
        assert runners.most == PER_NAMESPACE + 1

    fake_time(scenario())


def test_only_the_calls_of_the_newest_plan_are_sent(fake_time):
    async def scenario():
        runners, key = Runners("x"), JobKey("ns", "x")
        calls = ControlCalls(client=runners, answered=runners.note)
        sending = asyncio.create_task(calls.run())
        calls.send(key, "x", (call("a"),))
        await asyncio.sleep(1.0)
        for pods in ("b", "c", "d"):
            calls.send(key, "x", (call(pods),))
        await asyncio.sleep(3 * DEADLINE)
        assert [sent for _, _, sent in runners.calls] == [call("a"), call("d")], "one at a time"
        calls.send(key, "x", (call("e"),))
        await asyncio.sleep(1.0)
        calls.send(key, "x", (call("f"),))
        calls.send(key, "x", ())
        await asyncio.sleep(3 * DEADLINE)
        assert [sent for _, _, sent in runners.calls][2:] == [call("e")], "what is not needed any more is not sent"
        assert runners.answered[0] == (key, "x", call("a"), "")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    fake_time(scenario())


def test_a_failure_of_one_call_ends_no_other(fake_time):
    async def scenario():
        class Broken(Runners):
            async def call(self, job_uid, sent):
                if job_uid == "broken":
                    raise KeyError("a bug")
                return await super().call(job_uid, sent)

        runners = Broken()
        calls = ControlCalls(client=runners, answered=runners.note)
        calls.send(JobKey("ns", "broken"), "broken", (call("a"),))
        calls.send(JobKey("ns", "good"), "good", (call("b"),))
        await during(asyncio.sleep(1.0), calls.run())
        assert [uid for _, uid, _ in runners.calls] == ["good"]

    fake_time(scenario())
