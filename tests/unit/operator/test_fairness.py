"""Slots: never more than allowed, no key waits for another's whole backlog, a cancelled waiter costs nothing."""

import asyncio

from rljob_operator.runtime.fairness import FairSlots


async def worker(slots, key, log, running, seconds=1.0):
    async with slots.hold(key):
        running.append(key)
        log.append((key, len(running), running.count(key), asyncio.get_running_loop().time()))
        await asyncio.sleep(seconds)
        running.remove(key)


def test_neither_limit_is_passed(fake_time):
    async def scenario():
        slots, log, running = FairSlots(total=5, per_key=3), [], []
        await asyncio.gather(*(worker(slots, key, log, running) for key in "aaaaaaaabbbbcc"))
        assert len(log) == 14
        assert max(total for _, total, _, _ in log) == 5
        assert max(own for _, _, own, _ in log) == 3

    fake_time(scenario())


def test_a_small_job_does_not_wait_for_all_of_a_large_one(fake_time):
    async def scenario():
        slots, log, running = FairSlots(total=2, per_key=2), [], []
        large = [asyncio.create_task(worker(slots, "large", log, running)) for _ in range(20)]
        await asyncio.sleep(0)
        small = [asyncio.create_task(worker(slots, "small", log, running)) for _ in range(2)]
        await asyncio.gather(*large, *small)
        assert max(at for key, _, _, at in log if key == "small") <= 2.0
        assert max(at for key, _, _, at in log if key == "large") >= 9.0

    fake_time(scenario())


def test_cancelled_waiters_give_their_place_back(fake_time):
    async def scenario():
        slots, log, running = FairSlots(total=1, per_key=1), [], []
        first = asyncio.create_task(worker(slots, "a", log, running))
        await asyncio.sleep(0.5)
        waiters = [asyncio.create_task(worker(slots, "a", log, running)) for _ in range(3)]
        await asyncio.sleep(0.1)
        waiters[0].cancel()
        await first
        waiters[1].cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        await worker(slots, "b", log, running)
        assert [key for key, *_ in log][-1] == "b"

    fake_time(scenario())


def test_a_slot_handed_to_a_waiter_that_is_cancelled_in_that_moment_is_not_lost(fake_time):
    async def scenario():
        slots: FairSlots[str] = FairSlots(total=1, per_key=1)
        async with slots.hold("a"):
            waiter = asyncio.create_task(slots._acquire("b"))
            await asyncio.sleep(0)
        waiter.cancel()  # its slot is granted, and it has not run yet
        await asyncio.gather(waiter, return_exceptions=True)
        async with asyncio.timeout(1), slots.hold("c"):
            pass

    fake_time(scenario())


def test_waiters_that_are_cancelled_together_with_the_holder_do_not_stand_in_the_way(fake_time):
    """The end of a task group cancels holders and waiters in one turn of the loop: a slot is released before the waiters have run."""

    async def scenario():
        slots, log, running = FairSlots(total=1, per_key=1), [], []
        tasks = [asyncio.create_task(worker(slots, "a", log, running)) for _ in range(3)]
        last = asyncio.create_task(worker(slots, "a", log, running))
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        async with asyncio.timeout(5):
            await last

    fake_time(scenario())
