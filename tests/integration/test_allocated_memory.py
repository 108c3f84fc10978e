"""Arrays that a producer writes into memory of the channel server are put without a copy."""

import asyncio
import gc
import time

import numpy as np
import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.channel import Channel, puts
from rl_core.channel.backend import PutRequest
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.transports import tokens
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.rpc_connection import Connection
from tests.integration.test_channel import wait_until

MIB = 2**20


@pytest.fixture
def server():
    """A server whose store, that of this process, has lent nothing."""
    wait_until(lambda: gc.collect() >= 0 and ProcessSharedMemory.shared().store.stats()["lent"] == 0)
    server = ChannelServer("tcp://127.0.0.1:0").start()
    yield server
    server.close()


@pytest.fixture
def channel(server):
    client = ChannelClient(server.address)
    yield Channel.create("c", client=client)
    client.close()


@pytest.fixture(autouse=True)
def copied(monkeypatch):
    """The sizes of what was copied for puts."""
    sizes = []

    def counted(target, source, *, copy_into=puts.copy_into):
        sizes.append(source.nbytes)
        copy_into(target, source)

    monkeypatch.setattr(puts, "copy_into", counted)
    return sizes


def test_it_is_the_memory_that_the_consumer_reads(channel, server, copied):
    """One array begins the memory and one follows it; a third is elsewhere and is copied."""
    lent = asyncio.run(channel.allocate_async(3 * MIB))
    first, second = np.frombuffer(lent.memory, np.uint8, 2 * MIB).reshape(2, MIB)
    first[:], second[:] = 1, 2
    item = {"first": first, "second": second, "other": np.full(MIB, 3, np.uint8), "small": np.arange(3)}
    asyncio.run(channel.put_async(item, lent=[lent]))
    assert copied == [MIB]
    lent.release()
    lent.release()
    received = channel.get()
    assert all((received[name] == number).all() for name, number in (("first", 1), ("second", 2), ("other", 3)))
    second[5] = 9
    assert received["second"][5] == 9
    assert server.stats().memory["lent"] == 2
    del received
    wait_until(lambda: gc.collect() >= 0 and server.stats().memory["lent"] == 0)
    assert (tokens.DIRECTORY / lent.loan.segment).exists()


def test_it_may_be_put_under_several_keys(channel, server, copied):
    lent = asyncio.run(channel.allocate_async(MIB))
    array = np.frombuffer(lent.memory, np.uint8)[:MIB]
    array[:] = 7
    request = PutRequest(item=array, weight=0.0, key="a", timeout=5.0, lent=[lent])
    channel._backend.put_copies(request, ["a", "b"]).result(60)
    lent.release(reuse=True)
    assert (channel.get(key="a") == 7).all() and (channel.get(key="b") == 7).all() and not copied
    wait_until(lambda: gc.collect() >= 0 and server.stats().memory["lent"] == 0)


def test_it_is_deleted_if_a_lost_process_may_write_to_it(channel, server):
    lent = asyncio.run(channel.allocate_async(MIB))
    lent.release(reuse=False)
    wait_until(lambda: server.stats().memory["lent"] == 0)
    assert not (tokens.DIRECTORY / lent.loan.segment).exists()


def test_memory_that_was_released_is_refused_and_the_item_is_not_put(channel, server):
    lent = asyncio.run(channel.allocate_async(MIB))
    lent.release(reuse=True)
    wait_until(lambda: server.stats().memory["lent"] == 0)
    with pytest.raises(InfrastructureError, match="not lent to its producer"):
        asyncio.run(channel.put_async(np.frombuffer(lent.memory, np.uint8)[:MIB], lent=[lent]))
    assert channel.stats().bytes == 0


def test_it_is_none_where_the_server_cannot_be_reached_by_shared_memory(server, monkeypatch):
    monkeypatch.setattr(tokens, "shares_memory", lambda proof: False)
    client = ChannelClient(server.address)
    assert asyncio.run(Channel.create("s", client=client).allocate_async(MIB)) is None
    client.close()


def test_memory_of_a_cancelled_call_is_given_back(channel, server):
    """The answer may be here already when the task is cancelled, or on its way."""

    async def main():
        for _ in range(10):
            call = asyncio.ensure_future(channel.allocate_async(MIB))
            await asyncio.sleep(0)
            while not server.stats().memory["lent"]:
                time.sleep(0.001)  # holds the loop: the task does not run
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_until, lambda: not server.stats().memory["lent"])

    asyncio.run(main())


def test_a_release_is_no_message_in_the_middle_of_another(channel, server, monkeypatch):
    """The I/O thread sends releases, and other threads the frames of calls, by the same socket."""
    free = []

    def sent(self, parts, *, send_parts=Connection._send_parts):
        free.append(not self._lock._is_owned())
        send_parts(self, parts)

    monkeypatch.setattr(Connection, "_send_parts", sent)
    lent = asyncio.run(channel.allocate_async(MIB))
    num_sent = len(free)
    lent.release()
    wait_until(lambda: len(free) > num_sent)
    assert not any(free)
