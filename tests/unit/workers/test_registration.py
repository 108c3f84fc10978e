"""A worker process says hello until it is heard, tells a repeated hello from a new one, and knows when it is over."""

import asyncio
from dataclasses import replace

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded, EpochFenced, FrameError, WorkerLost
from rl_core.messages.members import HeartbeatAnswer, HelloAccepted, HelloRefused, View
from rl_core.workers import registration
from rl_core.workers.context import WorkerContext, stand_alone_identity
from rl_core.workers.registration import Ended, Registration


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(registration, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(registration, "SUCCESSOR_PAUSE", 0.0)


def accepted(job=None):
    return HelloAccepted(heartbeat_seconds=0.01, view=View(version=0, members=[]), job=job, files={})


class Hub:
    """Stands in for the client of the hub: gives the answers it was made with, one after another; errors are raised."""

    def __init__(self, *answers):
        self.answers, self.heard = list(answers), []

    async def call(self, method, *args, timeout, idempotent):
        self.heard.append((method, *args))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def set_epoch(self, epoch):
        """Nothing is sent."""

    def close(self):
        """Nothing to close."""


def registration_at(hub, role="rollout", **options):
    """Return a registration and the epochs it starts over at."""
    epochs = []
    context = WorkerContext(replace(stand_alone_identity(), role=role, group=role, hub="tcp://127.0.0.1:1"))

    async def start_over(epoch):
        epochs.append(epoch)
        context.enter_epoch(epoch)

    async def connect():
        return hub

    return Registration(context, connect=connect, start_over=start_over, **options), epochs


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), WorkerLost("the hub restarts")], ids=["late", "lost"])
def test_a_late_answer_repeats_the_hello_and_a_new_start_is_another_one(error):
    hub = Hub(error, error, accepted(), accepted())
    process, _ = registration_at(hub)

    async def twice():
        await process.register()
        await process.register()

    asyncio.run(twice())
    assert [report.registration for _, report in hub.heard] == [1, 1, 1, 2]
    assert process.accepted.is_set()


def test_an_elastic_member_of_an_older_epoch_starts_over_at_the_hubs():
    hub = Hub(HelloRefused(reason="older_epoch", epoch=3), accepted())
    process, epochs = registration_at(hub)
    asyncio.run(process.register())
    assert epochs == [3] and [report.epoch for _, report in hub.heard] == [0, 3]


def test_a_hub_of_an_older_epoch_is_asked_again_until_its_successor_answers():
    hub = Hub(HelloRefused(reason="newer_epoch", epoch=-1), accepted())
    process, epochs = registration_at(hub, "actor")
    asyncio.run(process.register())
    assert epochs == [] and len(hub.heard) == 2


@pytest.mark.parametrize(
    ("answer", "role", "code"),
    [
        (HelloRefused(reason="duplicate_rank", epoch=0), "rollout", 3),
        (HelloRefused(reason="older_epoch", epoch=1), "actor", 3),
        (HelloRefused(reason="wire_version", epoch=0), "rollout", 2),
        (FrameError("record 'HelloReport' is not registered here"), "rollout", 2),
        (ConfigError("a process of role env must not say hello as rollout"), "rollout", 2),
        (accepted(job='{"kind": "RLJob", "spec": {"unknown": 1}}'), "rollout", 2),
    ],
    ids=[
        "duplicate",
        "an actor's epoch",
        "wire version",
        "a hub that cannot read us",
        "role",
        "job of another release",
    ],
)
def test_a_hello_that_is_refused_for_good_ends_the_process(answer, role, code):
    process, _ = registration_at(Hub(answer), role)
    with pytest.raises(Ended) as end:
        asyncio.run(process.register())
    assert end.value.code == code


def test_a_hub_that_forgot_the_process_ends_the_heartbeats_and_a_successor_of_the_process_ends_it():
    async def after(*answers):
        process, _ = registration_at(Hub(accepted(), *answers))
        await process.register()
        await process.keep_in_touch()

    asyncio.run(after(HeartbeatAnswer(known=True), DeadlineExceeded("late"), HeartbeatAnswer(known=False)))
    with pytest.raises(Ended) as end:
        asyncio.run(after(EpochFenced("rollout:0 incarnation 0.0 was replaced by 0.1")))
    assert end.value.code == 3


class HubWithClock(Hub):
    """A hub whose unanswered heartbeats take the seconds that are given by a DeadlineExceeded, on a clock of its own."""

    now = 0.0

    async def call(self, method, *args, timeout, idempotent):
        try:
            return await super().call(method, *args, timeout=timeout, idempotent=idempotent)
        except DeadlineExceeded as error:
            self.now += float(str(error))
            raise


def heartbeats_until_lost(*answers):
    """Return how many heartbeats a member sends to a hub before it takes it for lost or is forgotten."""
    hub = HubWithClock(replace(accepted(), heartbeat_seconds=2.0), *answers)
    process, _ = registration_at(hub, clock=lambda: hub.now)

    async def run():
        await process.register()
        process.report_soon()
        await process.keep_in_touch()

    asyncio.run(asyncio.wait_for(run(), 60))
    return len(hub.heard) - 1


def test_a_hub_is_lost_after_as_many_seconds_of_heartbeats_without_an_answer():
    assert heartbeats_until_lost(*[DeadlineExceeded("2.0")] * 20) == 8


def test_a_pause_of_the_process_is_no_silence_of_the_hub():
    assert heartbeats_until_lost(*[DeadlineExceeded("60.0")] * 7, HeartbeatAnswer(known=False)) == 8


def test_what_changes_while_a_heartbeat_is_under_way_is_reported_by_the_next_one_at_once():
    class SlowHub(Hub):
        async def call(self, method, *args, timeout, idempotent):
            answer = await super().call(method, *args, timeout=timeout, idempotent=idempotent)
            if len(self.heard) == 2:
                process.report_soon()
                await asyncio.sleep(0)
            return answer

    once_an_hour = replace(accepted(), heartbeat_seconds=3600.0)
    known = HeartbeatAnswer(known=True)
    process, _ = registration_at(SlowHub(once_an_hour, known, known, HeartbeatAnswer(known=False)))

    async def run():
        await process.register()
        beats = asyncio.create_task(process.keep_in_touch())
        while len(process._context.hub.heard) < 3:
            await asyncio.sleep(0)
        process.report_soon()
        await beats

    asyncio.run(asyncio.wait_for(run(), 60))
