"""What answers that nobody got have done is undone: items, room and segments of requests that were cancelled or cut off."""

import asyncio
import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from rl_core.api.errors import FrameError, InfrastructureError, WorkerLost
from rl_core.channel import Channel, puts
from rl_core.channel.client import ChannelClient, RemoteBackend
from rl_core.channel.server import ChannelServer

MIB = 2**20


class Cable:
    """A TCP relay to `port`, whose answers can be swallowed and whose connections can be cut."""

    def __init__(self, port):
        self.deaf = False
        self.swallowed = b""
        self.plugged = True
        self._target = port
        self._ends = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, seconds=0.0):
        """Break all connections and refuse new ones for `seconds`."""
        self.plugged = seconds == 0
        while self._ends:
            _shut(self._ends.pop())
        self.deaf = False
        time.sleep(seconds)
        self.plugged = True

    def close(self):
        self._listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            if not self.plugged:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server has ended
                near.close()
                continue
            self._ends += [near, far]
            threading.Thread(target=self._relay, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._relay, args=(far, near, True), daemon=True).start()

    def _relay(self, source, sink, answers):
        try:
            while data := source.recv(65536):
                if answers and self.deaf:
                    self.swallowed += data
                else:
                    sink.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(sink)


def _shut(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server():
    server = ChannelServer("tcp://127.0.0.1:0").start()
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = ChannelClient(server.address)
    yield client
    client.close()


@pytest.fixture
def cable(server):
    cable = Cable(int(server.address.rsplit(":", 1)[1]))
    yield cable
    cable.close()


@pytest.fixture
def cabled(cable):
    client = ChannelClient(cable.address)
    yield client
    client.close()


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


@pytest.mark.parametrize("size", [MIB, 12 * MIB])
async def test_large_puts_cancelled_at_any_moment_keep_no_room_and_no_segment(server, client, size):
    channel = await asyncio.to_thread(lambda: Channel.create("c", client=client, maxsize=100))
    item = np.zeros(size, np.uint8)
    for number in range(24):
        put = asyncio.ensure_future(channel.put_async(item))
        await asyncio.sleep(0.0004 * (number % 8))
        put.cancel()
        await asyncio.wait([put])
    await channel.put_async("last")
    while isinstance(await channel.get_async(timeout=60), np.ndarray):
        pass

    def nothing_is_held():
        stats = server.stats()
        return stats.channels["c"].bytes == 0 and stats.memory["lent"] == 0

    await asyncio.to_thread(wait_until, nothing_is_held)


def test_an_item_whose_answer_was_lost_with_the_connection_goes_to_the_next(client, cable, cabled):
    channel, far = Channel.create("c", client=client), Channel.create("c", client=cabled)
    waiting = far.get(async_op=True)
    wait_until(lambda: _waiters(channel) == 1)
    cable.deaf = True
    channel.put("the item")
    wait_until(lambda: b"the item" in cable.swallowed)
    cable.cut()
    with pytest.raises(WorkerLost, match="the answer was lost"):
        waiting.wait(60)
    assert channel.get(timeout=60) == "the item"


def test_a_get_that_the_server_does_not_know_to_be_given_up_takes_nothing(client, cabled):
    channel, far = Channel.create("c", client=client), Channel.create("c", client=cabled)
    waiting = far.get(async_op=True)
    wait_until(lambda: _waiters(channel) == 1)
    cabled.rpc.fail("declared lost by the hub")  # the server hears nothing of it
    with pytest.raises(WorkerLost):
        waiting.wait(60)
    channel.put("x")
    assert channel.get(timeout=60) == "x"


def test_a_put_whose_answer_was_lost_is_not_run_again_for_a_client_taken_for_lost(client, cable, cabled):
    channel, far = Channel.create("c", client=client), Channel.create("c", client=cabled)
    cable.deaf = True
    put = far.put("x", async_op=True)
    wait_until(lambda: channel.qsize() == 1)
    cable.cut(seconds=1.75)  # longer than the server waits for a lost client, shorter than the client for the server
    with pytest.raises(WorkerLost, match="whether it ran is unknown"):
        put.wait(60)
    assert channel.qsize() == 1


def test_items_that_no_message_carries_are_not_lost(client):
    channel = Channel.create("c", client=client)
    for _ in range(1_700):
        channel.put(b"x" * 40_000, weight=1)
    with pytest.raises(Exception, match="header must have at most"):
        channel.get_batch(1_700, timeout=120)
    assert channel.qsize() == 1_700


def _waiters(channel):
    keys = channel.stats().keys
    return keys["default_queue"].waiters if "default_queue" in keys else 0


def test_an_item_that_cannot_be_decoded_is_gone_and_holds_no_other_up(client, monkeypatch):
    channel = Channel.create("c", client=client)
    for item in ("good", "bad", "fine"):
        channel.put(item, weight=1)
    load = RemoteBackend.load

    def picky(self, delivery):
        item = load(self, delivery)
        if item == "bad":
            raise FrameError("the record of this item is not known here")
        return item

    monkeypatch.setattr(RemoteBackend, "load", picky)
    with pytest.raises(FrameError, match="not known here"):
        channel.get_batch(3, timeout=60)
    assert [channel.get(timeout=60) for _ in range(2)] == ["good", "fine"]
    wait_until(lambda: channel.stats().bytes == 0)


def test_a_handle_whose_item_cannot_be_decoded_tells_so_each_time(client, monkeypatch):
    def refuse(self, delivery):
        raise FrameError("the record of this item is not known here")

    monkeypatch.setattr(RemoteBackend, "load", refuse)
    channel = Channel.create("c", client=client)
    channel.put("x")
    handle = channel.get(async_op=True)
    for _ in range(2):
        with pytest.raises(FrameError, match="not known here"):
            handle.wait(60)


def test_a_large_put_of_a_producer_taken_for_lost_is_no_end_of_the_channel(server, client, monkeypatch):
    channel = Channel.create("c", client=client)
    fill = puts.fill

    def slow(*arguments):
        server._io.run(lambda: [server._release(peer) for peer in list(server._rpc._peers.values())])
        return fill(*arguments)

    monkeypatch.setattr(puts, "fill", slow)
    with pytest.raises(InfrastructureError, match="taken for lost"):
        channel.put(np.zeros(12 * MIB, np.uint8), timeout=60)
    channel.put("still open")
