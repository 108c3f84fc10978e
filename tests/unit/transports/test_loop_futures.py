"""A coroutine that waits for a future of another thread: results, errors, cancellation both ways, one wake-up for many, closed loops."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from rl_core.transports.loop_futures import wait_future


async def waiting(future):
    """Return a task that waits for `future`."""
    task = asyncio.create_task(wait_future(future))
    await asyncio.sleep(0)
    return task


async def test_results_and_errors_of_futures_that_ended_before_or_end_later():
    ended, failed, later = Future(), Future(), Future()
    ended.set_result(1)
    failed.set_exception(KeyError("no"))
    assert await wait_future(ended) == 1
    with pytest.raises(KeyError, match="no"):
        await wait_future(failed)
    task = await waiting(later)
    threading.Thread(target=later.set_result, args=(2,)).start()
    assert await asyncio.wait_for(task, 60) == 2


async def test_a_cancelled_task_cancels_the_future_and_a_cancelled_future_the_wait():
    by_task, by_other = Future(), Future()
    task = await waiting(by_task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert by_task.cancelled()
    task = await waiting(by_other)
    by_other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_ends_before_the_loop_looks_wakes_it_once(monkeypatch):
    loop, wakes = asyncio.get_running_loop(), []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda *args, **options: wakes.append(1) or wake(*args, **options)
    )
    for _ in range(2):
        futures = [Future() for _ in range(100)]
        tasks = [await waiting(future) for future in futures]
        wakes.clear()
        for number, future in enumerate(futures):
            future.set_result(number)
        assert len(wakes) == 1
        assert await asyncio.gather(*tasks) == list(range(100))


async def test_no_wake_up_is_lost_while_several_threads_complete_futures():
    futures = [[Future() for _ in range(500)] for _ in range(4)]
    tasks = [await waiting(future) for row in futures for future in row]

    def complete(row):
        for number, future in enumerate(row):
            future.set_result(number)

    threads = [threading.Thread(target=complete, args=(row,)) for row in futures]
    for thread in threads:
        thread.start()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == list(range(500)) * 4
    for thread in threads:
        thread.join()


def test_a_future_may_end_after_the_loop_was_closed():
    future = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait_future(future))
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    orphan = Future()
    task = loop.create_task(wait_future(orphan))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    orphan.set_result(1)
    assert future.cancelled()
