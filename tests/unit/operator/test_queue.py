"""The work queue: once per key, never twice at a time, failures wait alone. Time is the loop's and jumps."""

import asyncio
import itertools
from collections import defaultdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_operator.runtime.queue import FIRST_BACKOFF, FREE_REPEATS, LONGEST_BACKOFF, WorkQueue


def steady() -> float:
    return 1.0


async def run_for(queue, handle, *, seconds, workers=2):
    """Run the queue for so many seconds of the loop's time."""
    task = asyncio.create_task(queue.run(handle, workers=workers))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_key_added_many_times_while_it_waits_is_handled_once(fake_time):
    async def scenario():
        queue, seen = WorkQueue(), []
        for _ in range(5):
            queue.add("a")

        async def handle(key):
            seen.append(key)

        await run_for(queue, handle, seconds=10)
        assert seen == ["a"]

    fake_time(scenario())


def test_a_key_added_while_it_is_handled_is_handled_again_afterwards(fake_time):
    async def scenario():
        queue, spans = WorkQueue(), []
        loop = asyncio.get_running_loop()
        queue.add("a")

        async def handle(key):
            began = loop.time()
            if not spans:
                loop.call_later(1, queue.add, "a")
                loop.call_later(2, queue.add, "a")
            await asyncio.sleep(5)
            spans.append((began, loop.time()))

        await run_for(queue, handle, seconds=60)
        assert spans == [(0, 5), (5, 10)]

    fake_time(scenario())


def test_other_keys_do_not_wait_for_a_slow_one(fake_time):
    async def scenario():
        queue, done = WorkQueue(), {}
        loop = asyncio.get_running_loop()
        for key in ("slow", "b", "c"):
            queue.add(key)

        async def handle(key):
            await asyncio.sleep(100 if key == "slow" else 1)
            done[key] = loop.time()

        await run_for(queue, handle, seconds=200)
        assert done == {"b": 1, "c": 2, "slow": 100}

    fake_time(scenario())


def test_a_key_that_fails_waits_twice_as_long_each_time_up_to_a_limit(fake_time):
    async def scenario():
        queue, times = WorkQueue(jitter=steady), []
        queue.add("a")

        async def handle(key):
            times.append(asyncio.get_running_loop().time())
            raise ValueError("no")

        await run_for(queue, handle, seconds=1000)
        pauses = [round(b - a, 6) for a, b in itertools.pairwise(times)]
        assert pauses[:4] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF, 8 * FIRST_BACKOFF]
        assert set(pauses[10:]) == {LONGEST_BACKOFF}

    fake_time(scenario())


def test_success_ends_the_back_off(fake_time):
    async def scenario():
        queue, times = WorkQueue(jitter=steady), []
        queue.add("a")

        async def handle(key):
            times.append(asyncio.get_running_loop().time())
            if len(times) != 4:
                raise ValueError("no")
            return 1.0

        await run_for(queue, handle, seconds=4)
        pauses = [round(b - a, 6) for a, b in itertools.pairwise(times)]
        assert pauses[:5] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF, 1.0, FIRST_BACKOFF]

    fake_time(scenario())


def test_jitter_shortens_the_pause_to_half_at_most(fake_time):
    async def scenario():
        queue, times = WorkQueue(), []
        queue.add("a")

        async def handle(key):
            times.append(asyncio.get_running_loop().time())
            raise ValueError("no")

        await run_for(queue, handle, seconds=2)
        assert FIRST_BACKOFF / 2 <= times[1] - times[0] <= FIRST_BACKOFF

    fake_time(scenario())


def test_the_earliest_of_several_times_counts(fake_time):
    async def scenario():
        queue, times = WorkQueue(), []
        queue.add_after("a", 30)
        queue.add_after("a", 10)
        queue.add_after("a", 20)

        async def handle(key):
            times.append(asyncio.get_running_loop().time())

        await run_for(queue, handle, seconds=100)
        assert times == [10]

    fake_time(scenario())


def test_an_event_overtakes_the_time_a_key_waits_for(fake_time):
    async def scenario():
        queue, times = WorkQueue(), []
        queue.add_after("a", 30)
        asyncio.get_running_loop().call_later(5, queue.add, "a")

        async def handle(key):
            times.append(asyncio.get_running_loop().time())

        await run_for(queue, handle, seconds=100)
        assert times == [5]

    fake_time(scenario())


def test_events_do_not_shorten_the_back_off_of_a_key_that_fails(fake_time):
    async def scenario():
        queue, turns = WorkQueue(jitter=lambda: 1.0), []

        async def handle(key):
            turns.append(asyncio.get_running_loop().time())
            raise RuntimeError("no")

        async def events():
            while True:
                queue.add("x")
                await asyncio.sleep(0.05)

        telling = asyncio.create_task(events())
        await run_for(queue, handle, seconds=30)
        telling.cancel()
        assert len(turns) == 8, "at 0, 0.2, 0.6, 1.4, 3, 6.2, 12.6, 25.4 s"

    fake_time(scenario())


def test_a_key_that_always_wants_another_turn_at_once_is_slowed_down(fake_time):
    async def scenario():
        queue, turns = WorkQueue(), {"hot": 0, "calm": 0}

        async def handle(key):
            turns[key] += 1
            return 0.0 if key == "hot" else None

        queue.add("hot")
        queue.add("calm")
        await run_for(queue, handle, seconds=30)
        assert turns["calm"] == 1 and turns["hot"] == FREE_REPEATS + 5

    fake_time(scenario())


def test_a_few_turns_in_a_row_are_free(fake_time):
    async def scenario():
        queue, at = WorkQueue(), []

        async def handle(key):
            at.append(asyncio.get_running_loop().time())
            return 0.0 if len(at) % 6 else 5.0

        queue.add("x")
        await run_for(queue, handle, seconds=12)
        assert at == [0.0] * 6 + [5.0] * 6 + [10.0] * 6

    fake_time(scenario())


def test_depth_counts_what_waits_and_idle_says_when_nothing_is_left(fake_time):
    async def scenario():
        queue = WorkQueue()
        assert queue.idle
        queue.add("a")
        queue.add("b")
        queue.add_after("c", 5)
        assert (len(queue), queue.delayed, queue.idle) == (2, 1, False)

        async def handle(key):
            pass

        await run_for(queue, handle, seconds=1)
        assert (len(queue), queue.delayed, queue.idle) == (0, 1, True)

    fake_time(scenario())


KEYS = st.sampled_from("abc")
STEPS = st.lists(st.tuples(KEYS, st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, workers=st.integers(1, 4), failing=st.sets(st.integers(0, 40)))
def test_whatever_happens_no_key_runs_twice_at_once_and_none_is_lost(fake_time, steps, workers, failing):
    """Each step adds a key after a pause; handling takes a time of its own, and some calls fail."""

    async def scenario():
        queue = WorkQueue(jitter=steady)
        loop = asyncio.get_running_loop()
        running, begun, added = set(), defaultdict(list), {}
        calls = iter(range(10_000))
        durations = {key: duration for key, _, duration in steps}

        async def handle(key):
            assert key not in running
            running.add(key)
            begun[key].append(loop.time())
            await asyncio.sleep(durations[key])
            running.discard(key)
            if next(calls) in failing:
                raise ValueError("no")

        async def feed():
            for key, pause, _ in steps:
                await asyncio.sleep(pause)
                queue.add(key)
                added[key] = loop.time()

        feeding = asyncio.create_task(feed())
        await run_for(queue, handle, seconds=10_000, workers=workers)
        await feeding
        assert queue.idle
        assert all(begun[key][-1] >= at for key, at in added.items())

    fake_time(scenario())
