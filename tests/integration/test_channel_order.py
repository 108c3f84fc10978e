"""Puts of one process to one key keep their order; none waits longer than it said, or for ever."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest

from rl_core.api.errors import ChannelFull, DeadlineExceeded, InfrastructureError
from rl_core.channel import Channel, puts
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.transports.rpc_wire import MAX_CALLS

LARGE = np.zeros(12 * 2**20, np.uint8)


class Clock:
    """The server's time, which tests turn."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def client(clock):
    server = ChannelServer("tcp://127.0.0.1:0", clock=clock).start()
    client = ChannelClient(server.address)
    yield client
    client.close()
    server.close()


@pytest.fixture
def written(monkeypatch):
    """Hold the copies of large items until it is set."""
    event, fill = threading.Event(), puts.fill

    def held(*arguments):
        assert event.wait(60)
        return fill(*arguments)

    monkeypatch.setattr(puts, "fill", held)
    yield event
    event.set()


@pytest.mark.parametrize("item", ["small", LARGE], ids=["small", "large"])
def test_a_put_behind_one_that_is_written_keeps_its_own_deadline(client, clock, written, item):
    channel = Channel.create("c", client=client)
    first = channel.put(LARGE, async_op=True)
    behind = channel.put(item, async_op=True, timeout=30)
    channel.qsize()
    clock.now += 31
    channel.qsize()
    with pytest.raises(DeadlineExceeded, match=r"put on channel 'c' key 'default_queue' waited 31\.0 s"):
        behind.wait(60)
    written.set()
    assert first.wait(60) is None and channel.qsize() == 1


def test_put_nowait_behind_one_that_is_written_is_full_at_once(client, written):
    channel = Channel.create("c", client=client)
    first = channel.put(LARGE, async_op=True)
    for item in ("small", LARGE):
        with pytest.raises(ChannelFull):
            channel.put_nowait(item)
    channel.put_nowait("of another key", key="k")
    written.set()
    first.wait(60)
    channel.put_nowait("small")


def test_more_puts_than_a_connection_has_credit_for_may_wait_behind_one_that_is_written(client, written):
    channel = Channel.create("c", client=client)
    handles = [channel.put(LARGE, async_op=True)]
    handles += [channel.put(number, async_op=True) for number in range(2 * MAX_CALLS)]
    handles.append(channel.put(LARGE, async_op=True))
    assert not any(handle.done() for handle in handles)
    written.set()
    assert all(handle.wait(60) is None for handle in handles)
    assert channel.get().nbytes == LARGE.nbytes
    assert [channel.get() for _ in range(2 * MAX_CALLS)] == list(range(2 * MAX_CALLS))
    assert channel.get().nbytes == LARGE.nbytes


def test_a_get_is_not_held_up_by_puts_of_its_own_process_that_wait_for_room_and_for_credit(client):
    channel = Channel.create("c", maxsize=1, client=client)
    handles = [channel.put(number, async_op=True) for number in range(2 * MAX_CALLS)]
    assert [channel.get(timeout=60) for _ in handles] == list(range(2 * MAX_CALLS))
    assert all(handle.wait(60) is None for handle in handles)


def test_large_puts_under_way_end_when_the_client_is_closed():
    server = ChannelServer("tcp://127.0.0.1:0").start()
    for delay in (0, 0.002, 0.01, 0.02):
        client = ChannelClient(server.address)
        channel = Channel.create("c", client=client)
        puts = [channel.put(LARGE, key=key, async_op=True) for key in range(12)]
        time.sleep(delay)
        client.close()
        for put in puts:
            try:
                put.wait(60)
            except InfrastructureError:
                pass
            except concurrent.futures.CancelledError as error:
                raise AssertionError("nobody cancelled it") from error
    server.close()


def test_receipts_are_not_lost_with_a_get_that_could_not_start(client):
    channel = Channel.create("c", client=client)
    channel.put("x")
    channel.get()
    with pytest.raises(TypeError):
        channel.get(key=object())
    end = time.monotonic() + 60
    while channel.stats().bytes:
        assert time.monotonic() < end, "the item that was received is still held for this client"
        time.sleep(0.01)
