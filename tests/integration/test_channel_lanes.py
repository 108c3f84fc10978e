"""Puts of one process to one key keep their order; none waits longer than it said, or for ever."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest

from rl_core.api.errors import ChannelFull, DeadlineExceeded, InfrastructureError
from rl_core.channel import Channel
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer

LARGE = np.zeros(12 * 2**20, np.uint8)
PATIENCE = 60.0
"""Seconds of the large put that others wait behind."""


@pytest.fixture
def client():
    server = ChannelServer("tcp://127.0.0.1:0").start()
    client = ChannelClient(server.address)
    yield client
    client.close()
    server.close()


@pytest.fixture
def behind_a_large_one(client):
    """A full channel for whose room a large put waits."""
    channel = Channel.create("c", maxsize=1, client=client)
    channel.put("first")
    large = channel.put(LARGE, async_op=True, timeout=PATIENCE)
    yield channel
    channel.get()
    large.wait(60)


@pytest.mark.parametrize("item", ["small", LARGE], ids=["small", "large"])
def test_a_put_behind_a_large_one_keeps_its_own_deadline(behind_a_large_one, item):
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"'c'.*earlier large put.*0\.3 s"):
        behind_a_large_one.put(item, timeout=0.3)
    assert 0.25 < time.monotonic() - began < PATIENCE / 2


def test_put_nowait_behind_a_large_one_is_full_soon(behind_a_large_one):
    began = time.monotonic()
    with pytest.raises(ChannelFull, match="earlier large put"):
        behind_a_large_one.put_nowait("small")
    assert time.monotonic() - began < PATIENCE / 2


def test_a_put_behind_a_large_one_has_the_rest_of_its_time_for_room(client, monkeypatch):
    channel = Channel.create("c", maxsize=2, client=client)
    channel.put("first")
    channel.put("second")
    large = channel.put(LARGE, async_op=True)
    given, start_call = [], client.rpc.start_call

    def start(method, args, *rest, **named):
        given.extend([args[4]] if method == "put" else [])
        return start_call(method, args, *rest, **named)

    monkeypatch.setattr(client.rpc, "start_call", start)
    small = channel.put("small", async_op=True, timeout=3)
    time.sleep(0.5)
    assert channel.get() == "first"
    large.wait(60)
    with pytest.raises(DeadlineExceeded):
        small.wait(60)
    assert all(seconds <= 2.5 for seconds in given[1:]), "0.5 s of its 3 were over before the server heard of it"
    assert [channel.get() if n == 0 else channel.get().nbytes for n in range(2)] == ["second", LARGE.nbytes]


def test_items_too_many_for_a_message_do_not_block_the_puts_behind_them(client):
    channel = Channel.create("c", maxsize=3_000, client=client)
    for _ in range(3_000):
        channel.put("x", async_op=True)
    large = channel.put(LARGE, async_op=True)
    refused = threading.Thread(target=_refused, args=(channel,))
    refused.start()
    time.sleep(1)
    channel.get()
    large.wait(60)
    refused.join(60)
    assert not refused.is_alive()
    channel.get()
    channel.put("still open", timeout=60)


def _refused(channel):
    with pytest.raises(ValueError, match="header must have at most"):
        channel.put_many([b"x" * 40_000] * 2_000, timeout=120)


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
