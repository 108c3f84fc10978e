"""The local channel: by reference, the same contract as through a server, without a server."""

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl_core.api.errors import ChannelClosed, ChannelEmpty, ChannelFull, ConfigError, DeadlineExceeded
from rl_core.channel import Channel
from rl_core.transports import frames
from rl_core.transports.sockets import IoThread


def _collect():
    """Return when what was dropped has been cleaned up, which the I/O thread does."""
    gc.collect()
    IoThread.shared().run(lambda: None)


@pytest.fixture
def channel():
    return Channel.create("c", local=True)


def test_items_pass_by_reference(channel):
    item = {"array": np.zeros(3), "anything": object()}
    channel.put(item)
    assert channel.get() is item


def test_order_sizes_and_states(channel):
    assert channel.empty() and not channel.full() and channel.qsize("never") == 0
    for number in range(3):
        channel.put(number)
    assert channel.qsize() == 3 and not channel.empty()
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


def test_the_example_of_weighted_batches(channel):
    for name, weight in (("a", 4), ("b", 1), ("c", 6)):
        channel.put(name, weight=weight)
    assert channel.get_batch(8) == ["a", "b"] and channel.qsize() == 1
    assert channel.get_batch(5) == [] and channel.get_batch(5, allow_oversize=True) == ["c"]


def test_max_bytes_bounds_what_lies_in_the_channel():
    channel = Channel.create("c", max_bytes=100, local=True)
    channel.put({"name": "x", "rows": [np.zeros(10), (b"12345",)]})  # 90 bytes
    with pytest.raises(ChannelFull):
        channel.put_nowait(np.zeros(2))
    with pytest.raises(ValueError, match="item has 104 bytes, channel 'c' holds at most 100"):
        channel.put(np.zeros(13))
    channel.get()
    channel.put_nowait(np.zeros(12))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_weights_must_be_finite_and_not_negative(channel, weight):
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        channel.put(1, weight=weight)
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        channel.get_batch(weight)


def test_nowait_raises_full_and_empty():
    channel = Channel.create("c", maxsize=1, local=True)
    with pytest.raises(ChannelEmpty):
        channel.get_nowait()
    channel.put_nowait(1)
    assert channel.full()
    with pytest.raises(ChannelFull):
        channel.put_nowait(2)
    assert channel.get_nowait() == 1


def test_deadlines_are_kept_and_tell_what_was_waited_for(channel):
    with pytest.raises(DeadlineExceeded, match="get from channel 'c' key 'default_queue'"):
        channel.get(timeout=0.02)
    full = Channel.create("f", maxsize=1, local=True)
    full.put(1)
    with pytest.raises(DeadlineExceeded, match="put on channel 'f'"):
        full.put(2, timeout=0.02)
    assert full.qsize() == 1


def test_async_op_returns_a_handle_at_once(channel):
    waiting = channel.get(async_op=True)
    assert not waiting.done()
    stored = channel.put("x", async_op=True)
    assert stored.wait() is None
    assert waiting.wait() == "x" and waiting.wait() == "x" and waiting.done()


def test_all_threads_that_wait_for_a_handle_have_its_item(channel):
    handle = channel.get(async_op=True)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(handle.wait, 60) for _ in range(8)]
        channel.put("x")
        assert [one.result() for one in waiting] == ["x"] * 8


def test_waiting_for_a_handle_has_its_own_deadline(channel):
    handle = channel.get(async_op=True)
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        handle.wait(timeout=0.02)
    channel.put("x")
    assert handle.wait(5) == "x"


def test_a_handle_that_is_dropped_returns_its_item_to_the_head(channel):
    channel.put("first")
    channel.put("second")
    handle = channel.get(async_op=True)
    assert handle.done()
    del handle
    _collect()
    assert channel.get() == "first"
    waiting = channel.get_batch(5, async_op=True)
    del waiting
    _collect()
    assert channel.get() == "second"


def test_dropping_the_handle_of_a_put_does_not_undo_it(channel):
    channel.put("x", async_op=True)
    _collect()
    assert channel.get(timeout=5) == "x"


def test_waiting_does_not_spin(channel):
    before = time.process_time()
    with pytest.raises(DeadlineExceeded):
        channel.get(timeout=0.3)
    assert time.process_time() - before < 0.15


class TestEnds:
    def test_what_is_stored_is_delivered_after_close_then_gets_end(self, channel):
        channel.put(0)
        channel.close()
        assert channel.get() == 0
        with pytest.raises(ChannelClosed):
            channel.put(4)
        with pytest.raises(ChannelClosed):
            channel.get()

    def test_gets_raise_the_error_of_close(self, channel):
        channel.close(error=ConfigError("no more"))
        with pytest.raises(ConfigError, match="no more"):
            channel.get()

    def test_an_error_of_close_that_is_none_is_refused_and_the_channel_stays_open(self, channel):
        with pytest.raises(TypeError, match="error must be an exception, got 'no more'; pass RuntimeError"):
            channel.close(error="no more")
        channel.put(0)
        assert channel.get() == 0

    def test_done_producing_closes(self, channel):
        for _ in range(2):
            channel.register_producer()
        channel.done_producing()
        channel.put(1)
        channel.done_producing()
        channel.done_producing()  # of nobody: without effect
        assert channel.get() == 1
        with pytest.raises(ChannelClosed):
            channel.put(2)


class TestAsync:
    async def test_coroutines_wait_without_blocking_the_loop(self, channel):
        waiting = asyncio.create_task(channel.get_async())
        await asyncio.sleep(0)
        await channel.put_async("x")
        assert await waiting == "x"

    async def test_a_cancelled_get_takes_nothing(self, channel):
        first, second = asyncio.create_task(channel.get_async()), asyncio.create_task(channel.get_async())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await channel.put_async("x")
        assert await second == "x"

    async def test_an_item_given_to_a_get_that_is_cancelled_meanwhile_goes_back_to_the_head(self, channel):
        getting = asyncio.create_task(channel.get_async())
        await asyncio.sleep(0.01)
        handles = [channel.put(name, async_op=True) for name in "ab"]  # delivered, not yet taken up by the task
        assert all(handle.done() for handle in handles)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert [await channel.get_async(), await channel.get_async()] == ["a", "b"]

    async def test_a_cancelled_batch_returns_what_it_held(self, channel):
        await channel.put_async("a", weight=1)
        batch = asyncio.create_task(channel.get_batch_async(5))
        await asyncio.sleep(0.01)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        assert await channel.get_async(timeout=5) == "a"

    async def test_sync_faces_refuse_the_event_loop_and_do_nothing(self, channel):
        await channel.put_async("x")
        for face in (
            channel.get,
            channel.qsize,
            channel.stats,
            channel.close,
            lambda: channel.put(1),
            channel.get_nowait,
        ):
            with pytest.raises(RuntimeError, match="event-loop thread"):
                face()
        assert (await asyncio.to_thread(channel.stats)).depth == 1
        handle = channel.get(async_op=True)
        assert await handle.async_wait() == "x"


def test_a_local_channel_cannot_travel(channel):
    with pytest.raises(TypeError, match="local to this process"):
        frames.encode({"c": channel})


class TestNames:
    """A local channel has its name within the process, as a server's has within the job."""

    def test_create_connects_to_its_equal_and_refuses_another(self):
        first = Channel.create("named", maxsize=3, local=True)
        again = Channel.create("named", maxsize=3, local=True)
        first.put("x")
        assert again.get() == "x"
        with pytest.raises(ConfigError, match="channel 'named' exists with .*use equal options or connect"):
            Channel.create("named", maxsize=4, local=True)

    def test_connect_finds_it(self):
        Channel.create("other", local=True)
        first = Channel.create("named", maxsize=1, local=True)
        first.put("x")
        assert Channel.connect("named").get() == "x"

    def test_a_producer_registered_through_one_handle_is_done_through_another(self):
        first, second = (Channel.create("named", local=True) for _ in range(2))
        first.register_producer()
        second.done_producing()
        with pytest.raises(ChannelClosed):
            first.put(1)

    def test_it_lives_as_long_as_a_handle_or_an_operation_on_it(self):
        first = Channel.create("named", maxsize=1, local=True)
        waiting = first.get(async_op=True, timeout=60)
        del first
        Channel.connect("named").put("x")
        assert waiting.wait(5) == "x"
        del waiting
        _collect()
        assert Channel.create("named", maxsize=2, local=True).empty()

    @pytest.mark.parametrize("end", ["served", "deadline", "cancelled"])
    def test_no_operation_that_ended_keeps_it(self, end):
        channel = Channel.create("named", maxsize=1, local=True)
        if end == "deadline":
            channel.put("x")
            waiting = channel.put("y", async_op=True, timeout=0)
            with pytest.raises(DeadlineExceeded):
                waiting.wait(5)
        else:
            waiting = channel.get(async_op=True, timeout=600)
        if end == "served":
            channel.put("x")
            assert waiting.wait() == "x"
        del waiting, channel
        for _ in range(2):  # what the I/O thread ran last is held until its next turn
            IoThread.shared().run(lambda: None)
        assert Channel.create("named", maxsize=2, local=True).empty()


def test_keys_of_a_channel_have_their_queues_and_their_stats(channel):
    key = ("actor", "rollout", 0, 1)
    channel.put("x", key=key)
    assert channel.stats().keys[key].depth == 1 and channel.get(key=key) == "x"
    assert channel.stats().keys == {}


def test_an_item_larger_than_the_channel_is_refused_at_once_also_without_waiting():
    channel = Channel.create("small", max_bytes=10, local=True)
    with pytest.raises(ValueError, match="item has 11 bytes, channel 'small' holds at most 10; raise max_bytes"):
        channel.put(b"x" * 11, async_op=True)


def test_what_one_server_cannot_do_is_refused():
    for options in ({"distributed": True}, {"node_rank": 1}):
        with pytest.raises(ConfigError, match="a channel server per node"):
            Channel.create("c", local=True, **options)


def test_stats_have_the_metrics_of_the_specification(channel):
    channel.put({"secret": 1})
    names = {"depth", "bytes", "oldest_age_seconds", "waiters", "put_wait_seconds"}
    totals = {"puts_total", "gets_total", "redelivered_total"}
    assert set(channel.stats().metrics()) == {f"channel/{name}" for name in names | totals}
    assert "secret" not in str(channel) and "1 items" in str(channel)
