"""Handlers of calls: their order, how many run at a time, cancelled ones, and the wait until none is left."""

import asyncio
import threading

import pytest

from rl_core.transports.handlers import HandlerRunner


class Call:
    """Implements what the runner uses of `IncomingCall`; `ended` is set with the reply."""

    caller, host = None, ""

    def __init__(self, *args):
        self.args, self.cancelled, self.on_cancel = args, False, None
        self.ended, self.outcome = threading.Event(), None

    def arguments(self):
        return list(self.args), {}

    def reply(self, value):
        self.outcome = value
        self.ended.set()
        return True

    def fail(self, error):
        self.outcome = error
        self.ended.set()

    def result(self):
        assert self.ended.wait(60)
        return self.outcome


@pytest.fixture
def runner():
    made = HandlerRunner(threads=1, coroutines=1)
    yield made
    made.close()


def test_one_thread_runs_all_functions_in_order(runner):
    order = []
    calls = [Call(number) for number in range(100)]
    for call in calls:
        runner.submit(call, lambda number: order.append((number, threading.get_ident())))
    assert calls[-1].result() is None
    assert [number for number, _ in order] == list(range(100)) and len({thread for _, thread in order}) == 1


def test_what_is_cancelled_while_it_waits_never_runs_and_is_answered(runner):
    release, ran = threading.Event(), []
    first, second, third = Call(), Call(), Call()
    runner.submit(first, lambda: release.wait(60))
    runner.submit(second, lambda: ran.append("second"))
    runner.submit(third, lambda: ran.append("third"))
    second.cancelled = True
    release.set()
    assert third.result() is None and ran == ["third"]
    assert isinstance(second.result(), asyncio.CancelledError)


def test_a_reply_that_fails_ends_no_thread(runner):
    def broken(value):
        raise OSError("no socket")

    call = Call()
    call.reply = call.fail = broken
    runner.submit(call, lambda: 1)
    following = Call()
    runner.submit(following, lambda: 2)
    assert following.result() == 2


async def test_idle_is_when_functions_coroutines_and_those_that_wait_have_ended(runner):
    release, started = threading.Event(), asyncio.Event()

    async def later(number):
        await asyncio.to_thread(release.wait, 60)
        return number

    calls = [Call(number) for number in range(4)]
    for call in calls[:2]:
        runner.submit(call, later)  # the second waits for the first
    for call in calls[2:]:
        runner.submit(call, lambda number: release.wait(60) and number)

    async def wait():
        started.set()
        await runner.wait_idle()
        return [call.ended.is_set() for call in calls]

    waiting = asyncio.create_task(wait())
    await started.wait()
    assert not waiting.done()
    release.set()
    assert await asyncio.wait_for(waiting, 60) == [True] * 4
    assert [call.outcome for call in calls] == [0, 1, 2, 3]
    await runner.wait_idle()


def test_a_new_limit_lets_later_functions_pass_those_that_block(runner):
    release = threading.Event()
    blocked, behind = Call(), Call()
    runner.submit(blocked, lambda: release.wait(60))
    runner.submit(behind, lambda: "behind")
    runner.limit(2)
    together, calls = threading.Barrier(2), [Call(), Call()]
    for call in calls:
        runner.submit(call, lambda: together.wait(60) >= 0)
    assert [call.result() for call in calls] == [True, True] and not blocked.ended.is_set()
    release.set()
    assert behind.result() == "behind"


class Gate:
    """A handler that ends when it is opened, and counts how many run at a time and in which order they started."""

    def __init__(self):
        self.release, self.started, self.running, self.most = threading.Event(), [], 0, 0
        self.count = threading.Semaphore(0)

    async def __call__(self, number):
        self.started.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        self.count.release()
        while not self.release.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # another that starts now would be counted beside this one
        self.running -= 1

    def wait_for(self, number):
        for _ in range(number):
            assert self.count.acquire(timeout=60)


@pytest.fixture
def gate():
    return Gate()


def handler_of(gate):
    async def handle(number):
        await gate(number)

    return handle


def test_a_lower_limit_holds_for_coroutines_that_wait(gate):
    runner = HandlerRunner(threads=1, coroutines=4)
    before, behind = Gate(), gate
    calls = [Call(number) for number in range(4)]
    for call in calls:
        runner.submit(call, handler_of(before))
    before.wait_for(4)
    later = [Call(number) for number in range(8)]
    for call in later:
        runner.submit(call, handler_of(behind))
    runner.limit(2)
    behind.release.set()
    before.release.set()
    for call in calls + later:
        call.result()
    assert before.most == 4 and behind.most <= 2 and behind.started == list(range(8))
    runner.close()


def test_a_higher_limit_starts_coroutines_that_wait_in_their_order(runner, gate):
    calls = [Call(number) for number in range(4)]
    for call in calls:
        runner.submit(call, handler_of(gate))
    gate.wait_for(1)
    runner.limit(3)
    calls.append(Call(4))
    runner.submit(calls[4], handler_of(gate))
    gate.wait_for(2)
    assert gate.started == [0, 1, 2]
    gate.release.set()
    for call in calls:
        call.result()
    assert gate.started == list(range(5)) and gate.most == 3
