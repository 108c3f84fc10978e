"""Coroutines on the thread of a worker run one at a time: one that was cancelled has ended before the next one begins."""

import asyncio

import pytest

from rl_core.workers.loop_thread import LoopThread


@pytest.mark.parametrize("nested", [0, 1, 3])
def test_a_cancelled_coroutine_ends_before_the_next_one_begins(nested):
    """It needs several passes of the event loop to end where it waits for tasks of its own."""
    thread, events = LoopThread("test"), []

    async def inner(depth):
        await (asyncio.gather(inner(depth - 1)) if depth else asyncio.sleep(60))

    async def first():
        events.append("first begins")
        try:
            await inner(nested)
        finally:
            events.append("first ends")

    async def second():
        events.append("second begins")

    async def main():
        running = thread.submit(first())
        while not events:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait_for(thread.submit(second()), 60)

    asyncio.run(main())
    thread.close()
    assert events == ["first begins", "first ends", "second begins"]
