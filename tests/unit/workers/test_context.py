"""What a worker process knows of the others and tells of itself."""

import asyncio

import pytest

from rl_core.messages.members import DeclaredWait, MemberState, MemberView, View
from rl_core.workers.context import WorkerContext
from rl_core.workers.timers import Timers, worker_timer


def member(name, state="serving", **changes):
    role, _, rank = name.partition(":")
    fields = {"role": role, "group": role, "rank": int(rank), "pod": "p", "address": "tcp://127.0.0.1:1", "pid": 1}
    return MemberView(name=name, host_token="", incarnation=(0, 0), state=MemberState(state), **(fields | changes))


def view(version, *members):
    return View(version=version, members=list(members))


def test_views_are_taken_in_by_parts_and_the_gone_are_not_listed():
    context = WorkerContext()
    context.update_view(view(1, member("env:1"), member("env:0"), member("rollout:0")))
    context.update_view(view(2, member("env:0", "lost")))
    assert [m.name for m in context.members()] == ["env:1", "rollout:0"]
    assert [m.name for m in context.members("env")] == ["env:1"]
    assert context.heartbeat().view_version == 2


def test_the_oldest_declared_wait_is_reported_with_its_seconds():
    now = [100.0]
    context = WorkerContext(clock=lambda: now[0])
    assert context.heartbeat().wait is None
    with context.waiting("a step", "env:0"):
        now[0] = 103.0
        with context.waiting("room", "trajectories"):
            assert context.heartbeat().wait == DeclaredWait(what="a step", on="env:0", since_seconds=3.0)
    assert context.heartbeat().wait is None


def test_states_and_versions_are_reported_at_once():
    told = []
    context = WorkerContext(on_change=lambda: told.append((context.state.value, context.policy_version)))
    context.set_state("updating")
    context.set_policy_version(4, "d")
    assert told == [("updating", None), ("updating", 4)]
    with pytest.raises(ValueError):
        context.set_state("resting")


async def test_everybody_who_waits_for_a_change_of_the_view_is_woken():
    context = WorkerContext()
    waiters = [asyncio.create_task(context.view_changed()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(context.update_view, view(1, member("env:0")))
    await asyncio.wait_for(asyncio.gather(*waiters), 10)


def test_the_view_of_a_new_hub_replaces_that_of_the_old_one():
    context = WorkerContext()
    context.update_view(view(9, member("env:0")))
    context.welcome(None, {}, view(1, member("env:1")))
    assert [m.name for m in context.members()] == ["env:1"] and context.heartbeat().view_version == 1


def test_a_process_that_drains_for_good_takes_no_other_state():
    context = WorkerContext()
    context.retire()
    context.set_state("serving")
    assert context.state is MemberState.DRAINING
    context.set_state("drained")
    assert context.state is MemberState.DRAINED


def ticking():
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    return clock


def test_timers_sum_seconds_by_tag_and_start_again():
    timers = Timers(clock=ticking())

    @worker_timer(timers=timers)
    def train():
        with worker_timer("forward", timers=timers):
            pass

    train()
    train()
    assert timers.pop() == {"forward": 2.0, "train": 6.0}
    assert timers.pop() == {}


async def test_timers_cover_the_whole_of_an_async_method():
    timers = Timers(clock=ticking())

    @worker_timer("nap", timers=timers)
    async def nap():
        timers.clock()
        await asyncio.sleep(0)
        return "rested"

    assert await nap() == "rested" and timers.pop() == {"nap": 2.0}
