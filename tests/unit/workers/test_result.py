"""What a group call gives back: values in rank order, failures soon, missing ranks by name; sync and async faces agree."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

from rl_core.api.errors import DataError, DeadlineExceeded, RemoteError, RLJobError, WorkerLost
from rl_core.messages.calls import MethodResult
from rl_core.transports.rpc_call import ClientClosed
from rl_core.workers.deadline_wait import DeadlineWait
from rl_core.workers.result import CallCancelled, WorkerGroupFuncResult


class FakeCall:
    """Implements `result.RankCall`; tests end it."""

    def __init__(self, rank):
        self.rank = rank
        self.future = Future()
        self.cancelled = False

    def describe(self):
        return f"actor:{self.rank} (pod j-actor-{self.rank}, tokens 5)"

    def cancel(self):
        self.cancelled = True
        self.future.cancel()

    def end(self, value, **durations):
        self.future.set_result(MethodResult(value=value, durations=durations or {"train": float(self.rank + 1)}))


def make(count=3, **options):
    calls = {rank: FakeCall(rank) for rank in reversed(range(count))}
    return [calls[rank] for rank in range(count)], WorkerGroupFuncResult("actor", "train", calls, **options)


def both_faces(test):
    """Run a test with the blocking wait and with the coroutine."""

    def blocking(result, timeout=None):
        return result.wait(timeout)

    def awaiting(result, timeout=None):
        return asyncio.run(result.async_wait(timeout))

    return pytest.mark.parametrize("wait", [blocking, awaiting], ids=["wait", "async_wait"])(test)


@both_faces
def test_values_come_in_rank_order_whatever_ended_first(wait):
    calls, result = make()
    for rank in (2, 0, 1):
        calls[rank].end(f"value {rank}")
    assert result.done()
    assert wait(result) == ["value 0", "value 1", "value 2"] == wait(result)


@both_faces
def test_a_wait_ends_when_the_last_rank_does(wait):
    calls, result = make(2)
    calls[0].end(0)
    assert not result.done()
    threading.Timer(0.05, calls[1].end, [1]).start()
    assert wait(result, 30) == [0, 1]


@both_faces
def test_one_failure_is_raised_as_it_is_once_all_ranks_ended(wait):
    calls, result = make(2, settle=60)
    calls[1].future.set_exception(DataError("bad sample"))
    threading.Timer(0.05, calls[0].end, [0]).start()
    with pytest.raises(DataError, match="bad sample"):
        wait(result, 30)
    assert calls[0].future.done()


@both_faces
def test_a_failure_is_raised_although_another_rank_hangs(wait):
    calls, result = make(2, settle=0.05)
    calls[0].future.set_exception(WorkerLost("actor:0 is gone"))
    with pytest.raises(WorkerLost):
        wait(result, 3600)
    assert not calls[1].future.done() and not calls[1].cancelled


@both_faces
def test_several_failures_come_as_a_group_with_their_own_types(wait):
    calls, result = make(3)
    calls[0].end(0)
    calls[1].future.set_exception(DataError("one"))
    calls[2].future.set_exception(RemoteError("two"))
    with pytest.raises(ExceptionGroup) as caught:
        wait(result)
    assert [type(error) for error in caught.value.exceptions] == [DataError, RemoteError]
    assert isinstance(caught.value, RLJobError) and "2 of 3 ranks, the first: DataError: one" in str(caught.value)


@both_faces
def test_a_missed_deadline_names_the_missing_ranks_seconds_and_progress_only(wait):
    calls, result = make(3)
    calls[1].end(1)
    with pytest.raises(DeadlineExceeded) as caught:
        wait(result, 0.05)
    text = str(caught.value)
    assert "actor.train" in text and "0.1 s" in text
    assert "actor:0 (pod j-actor-0, tokens 5)" in text and "actor:2" in text and "actor:1" not in text


def test_without_a_timeout_the_deadline_is_that_of_the_call_and_not_of_the_wait():
    now = [0.0]
    calls, result = make(1, default_timeout=60, clock=lambda: now[0])
    now[0] = 61.0
    with pytest.raises(DeadlineExceeded, match=r"within 60 s, missing after 61\.0 s: actor:0"):
        result.wait()
    calls[0].end("late")
    assert result.wait() == ["late"]


@both_faces
@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "30"])
def test_for_ever_is_no_deadline(wait, timeout):
    with pytest.raises(ValueError, match="finite number of seconds"):
        wait(make(1)[1], timeout)


def test_a_wait_names_the_failures_of_other_calls_whose_errors_nobody_has_received():
    """The script waits for the call that hangs because another one has failed."""
    (hanging,), first = make(1)
    (broken, _), second = make(2, settle=0.0)
    broken.future.set_exception(RemoteError("scorer rank 0: score raised KeyError: 'row'\nTraceback"))
    with pytest.raises(
        DeadlineExceeded, match=r"tokens 5\); actor.train failed: RemoteError: scorer rank 0: .* 'row'$"
    ):
        first.wait(0.0)
    with pytest.raises(RemoteError):
        second.wait(0.0)
    with pytest.raises(DeadlineExceeded, match=r"tokens 5\)$"):
        first.wait(0.0)
    hanging.end(1)


def test_a_deadline_does_not_end_the_call_and_a_later_wait_succeeds():
    calls, result = make(1)
    with pytest.raises(DeadlineExceeded):
        result.wait(0.01)
    calls[0].end("late")
    assert result.wait() == ["late"]


def test_cancel_wakes_the_waiter_and_reaches_every_rank_that_runs():
    calls, result = make(2)
    calls[0].end(0)
    threading.Timer(0.05, result.cancel).start()
    with pytest.raises(CallCancelled):
        result.wait(30)
    assert calls[1].cancelled and result.done()


def test_cancel_after_the_end_changes_nothing():
    calls, result = make(1)
    calls[0].end("value")
    result.cancel()
    assert result.wait() == ["value"]


def test_waiting_in_an_event_loop_thread_is_refused():
    _, result = make(1)

    async def main():
        result.wait()

    with pytest.raises(RuntimeError, match="asynchronous form"):
        asyncio.run(main())


def test_an_abandoned_async_wait_leaves_the_call_running():
    calls, result = make(1)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(result.async_wait(), 0.02)
        calls[0].end("value")
        return await result

    assert asyncio.run(main()) == ["value"]


@pytest.mark.parametrize(("reduction", "expected"), [("max", 3.0), ("min", 1.0), ("mean", 2.0)])
def test_the_duration_of_the_method_is_reduced_over_ranks_and_consumed_once(reduction, expected):
    calls, result = make(3)
    for call in calls:
        call.end(None)
    assert result.consume_duration(reduction) == expected
    assert result.consume_duration(reduction) == 0.0


def test_durations_come_by_tag_and_by_rank():
    calls, result = make(2)
    calls[0].end(None, train=1.0, forward=0.5)
    calls[1].end(None, train=2.0)
    reduced, per_rank = result.consume_durations(True)
    assert reduced == {"train": 2.0, "forward": 0.5}
    assert per_rank == [{"train": 1.0, "forward": 0.5}, {"train": 2.0}]
    assert result.consume_durations() == {"train": 0.0, "forward": 0.0}


def test_an_unknown_reduction_is_refused_before_anything_is_consumed():
    calls, result = make(1)
    calls[0].end(None)
    with pytest.raises(ValueError, match="median"):
        result.consume_duration("median")
    assert result.consume_duration() == 1.0


def test_long_waits_warn_at_a_tenth_and_at_half_of_the_deadline(caplog):
    now = [0.0]
    wait = DeadlineWait("actor.train", 100, clock=lambda: now[0])
    pauses = []
    for at in (0, 9, 10, 11, 49, 50, 51, 99, 100):
        now[0] = at
        pauses.append(wait.pause(lambda: "actor:0"))
    assert pauses == [10, 1, 40, 39, 1, 50, 49, 1, None]
    assert [record.getMessage() for record in caplog.records] == [
        "waited 10 of 100 s for actor.train: actor:0",
        "waited 50 of 100 s for actor.train: actor:0",
    ]


def test_a_wait_may_end_before_its_time_and_a_short_one_warns_of_nothing(caplog):
    wait = DeadlineWait("actor.train", 40, clock=lambda: 10.0)
    assert wait.pause(str, end=12.0) == 2.0 and wait.pause(str, end=9.0) is None
    short = DeadlineWait("actor.train", 9, began=0.0, clock=lambda: 8.0)
    assert short.pause(str) == 1.0 and caplog.records == []


def test_a_wait_for_the_end_tells_its_own_time_from_a_deadline_that_a_rank_raises():
    calls, result = make()
    assert not result.wait_done(0.0)
    for call in calls:
        call.future.set_exception(DeadlineExceeded("the rank's own deadline"))
    assert result.wait_done(0.0)
    with pytest.raises(RLJobError, match="the rank's own deadline"):
        result.wait(0.0)


def test_a_wait_for_the_end_gives_the_other_ranks_time_after_the_first_failure():
    now = [0.0]
    calls, result = make(settle=5.0, clock=lambda: now[0])
    calls[0].future.set_exception(DataError("line 3"))
    assert not result.wait_done(0.0)
    now[0] = 5.0
    assert result.wait_done(0.0)


def test_a_cancelled_call_is_over():
    _, result = make()
    result.cancel()
    assert result.wait_done(0.0)


def test_a_call_that_has_ended_is_freed_without_the_garbage_collector():
    collecting = gc.isenabled()
    gc.disable()
    try:
        (first, second), result = make(2)
        first.end(1)
        second.end(2)
        assert result.wait() == [1, 2]
        gone = weakref.ref(result)
        del result
        assert gone() is None
    finally:
        if collecting:
            gc.enable()


def test_a_call_that_nobody_holds_ends_all_the_same():
    (only,), result = make(1)
    del result
    only.end(1)
    assert only.future.result().value == 1


@pytest.mark.parametrize("first", ["dropped", "failed"])
def test_a_failure_that_nobody_waited_for_is_logged_unless_the_rank_is_lost_or_the_caller_ended(first, caplog):
    calls, result = make(4)
    if first == "dropped":
        del result
    calls[0].end(0)
    calls[1].future.set_exception(RemoteError("actor rank 1: train raised ValueError: bad"))
    calls[2].future.set_exception(WorkerLost("actor:2 is lost"))
    calls[3].future.set_exception(ClientClosed("train at actor:3: the client was closed"))
    result = None
    assert [record.getMessage() for record in caplog.records] == [
        "actor.train failed and nobody waited for its result: RemoteError: actor rank 1: train raised ValueError: bad"
    ]


def test_a_failure_that_was_raised_and_a_call_that_was_cancelled_are_not_logged(caplog):
    calls, result = make(1)
    calls[0].future.set_exception(DataError("bad"))
    with pytest.raises(DataError):
        result.wait(30)
    calls, result = make(1)
    result.cancel()
    del result
    assert caplog.records == []
