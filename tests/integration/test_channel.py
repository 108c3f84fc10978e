"""Channels through a server over real sockets: contract, large items, order, cancellation, clock, members, roles."""

import asyncio
import gc
import time
from dataclasses import replace

import numpy as np
import pytest

from rl_core.api.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelFull,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EpochFenced,
    InfrastructureError,
    ProducerLost,
)
from rl_core.api.identity import Identity
from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.channel import Channel
from rl_core.channel.backend import PutRequest
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.messages.channel import SegmentPart
from rl_core.transports import curve, frames, rpc_wire, tokens
from rl_core.transports.links import ProcessSharedMemory
from tests.curve_keys import generate_keys

MIB = 2**20


def identity(role="rollout", rank=0, attempt=0, epoch=0):
    return Identity(
        job="j", namespace="n", uid="u1", epoch=epoch, role=role, pod=f"j-{role}-{rank}", pod_index=rank, group=role, rank=rank,
        world_size=1, attempt=attempt,
    )  # fmt: skip


class Clock:
    """Time that tests turn."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(clock):
    server = ChannelServer("tcp://127.0.0.1:0", clock=clock).start()
    yield server
    server.close()


@pytest.fixture
def connect(server):
    clients = []

    def make(who=None):
        clients.append(ChannelClient(server.address, None, who))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def channel(connect):
    return Channel.create("c", client=connect())


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "did not happen within 60 s"
        time.sleep(0.01)


class TestContract:
    def test_items_of_all_kinds_in_order(self, channel):
        record = PromptGroupRecord(
            prompt_idx=1,
            prompt=[],
            extra_env_info=None,
            metadata={},
            completions=[Completion(message_log=[], reward=1.0)],
        )
        items = [1, "x", (2, [3]), {"a": None}, record, np.arange(5)]
        for item in items:
            channel.put(item)
        again = [channel.get() for _ in items]
        assert again[:5] == items[:5] and again[5].tolist() == [0, 1, 2, 3, 4]

    def test_batches_sizes_and_states(self, channel):
        assert channel.qsize("never") == 0 and channel.empty() and not channel.full()
        for name, weight in (("a", 4), ("b", 1), ("c", 6)):
            channel.put(name, weight=weight)
        assert channel.get_batch(8) == ["a", "b"] and channel.qsize() == 1
        assert channel.get_batch(5) == [] and channel.get_batch(5, allow_oversize=True) == ["c"]

    def test_gets_that_wait_leave_the_credit_to_the_puts_they_wait_for(self, channel):
        waiting = [channel.get(async_op=True) for _ in range(2 * rpc_wire.MAX_CALLS)]
        for number in range(len(waiting)):
            channel.put(number, timeout=60)
        assert [handle.wait(60) for handle in waiting] == list(range(len(waiting)))

    def test_puts_that_wait_for_room_and_for_credit_do_not_hold_up_the_gets_that_make_room(self, connect):
        channel = Channel.create("narrow", maxsize=1, client=connect())
        handles = [channel.put(number, async_op=True) for number in range(2 * rpc_wire.MAX_CALLS)]
        assert [channel.get(timeout=60) for _ in handles] == list(range(len(handles)))
        assert all(handle.wait(60) is None for handle in handles)

    def test_nowait_and_deadlines(self, connect):
        channel = Channel.create("f", maxsize=1, client=connect())
        with pytest.raises(ChannelEmpty):
            channel.get_nowait()
        channel.put_nowait(1)
        for item in (2, np.zeros(MIB)):
            with pytest.raises(ChannelFull):
                channel.put_nowait(item)
        assert channel.qsize() == 1 and channel.full()

    def test_the_servers_deadline_is_told(self, channel, clock):
        waiting = channel.get(timeout=30, async_op=True)
        channel.qsize()
        clock.now += 31
        channel.qsize()
        with pytest.raises(DeadlineExceeded, match=r"get from channel 'c' key 'default_queue' waited 31\.0 s: depth 0"):
            waiting.wait(60)

    def test_what_cannot_travel_is_refused_before_anything_is_sent(self, channel):
        with pytest.raises(TypeError, match="cannot travel"):
            channel.put({"x": object()})
        with pytest.raises(ValueError, match="must be finite"):
            channel.put(1, weight=-1)
        with pytest.raises(ValueError, match="timeout must be None"):
            channel.get(timeout=float("inf"))
        assert channel.qsize() == 0

    def test_create_connects_to_its_equal_and_refuses_another(self, channel, connect):
        again = Channel.create("c", client=connect())
        channel.put(1)
        assert again.get() == 1
        with pytest.raises(ConfigError, match="channel 'c' exists with"):
            Channel.create("c", maxsize=3, client=connect())

    def test_connect_waits_for_the_creation(self, connect):
        client = connect()
        with pytest.raises(DeadlineExceeded, match="'late' was not created in time"):
            Channel.connect("late", timeout=0, client=client)
        waiting = client.connect("late", 20)
        Channel.create("late", client=connect()).put("x")
        assert Channel("late", waiting.result(20), local=False).get() == "x"

    def test_close_and_errors(self, channel):
        channel.put(1)
        channel.close(error=DataError("bad file"))
        with pytest.raises(ChannelClosed):
            channel.put(2)
        assert channel.get() == 1
        with pytest.raises(DataError, match="bad file"):
            channel.get()

    def test_handles_travel(self, channel, server, monkeypatch):
        from rl_core.channel import client as client_module

        configured = client_module.configure(server.address)
        handle = frames.decode([bytes(memoryview(part)) for part in frames.encode({"channel": channel})])["channel"]
        handle.put("through the handle")
        assert channel.get() == "through the handle"
        assert client_module.current() is configured
        configured.close()
        monkeypatch.setattr(client_module, "_current", None)
        with pytest.raises(ConfigError, match="has no channel server"):
            Channel.create("x")

    def test_stats_without_payloads(self, channel, server):
        channel.put({"secret": 1}, key="a")
        stats = channel.stats()
        assert stats.depth == 1 and stats.keys["a"].depth == 1 and stats.puts == 1
        assert "secret" not in str(channel) + str(server.stats())


class TestLargeItems:
    @pytest.fixture(autouse=True)
    def nothing_lent(self):
        """The store is the process's: what earlier tests were lent comes back first."""
        wait_until(lambda: gc.collect() >= 0 and ProcessSharedMemory.shared().store.stats()["lent"] == 0)

    def test_they_lie_in_segments_of_the_server_and_are_freed(self, channel, server):
        store = ProcessSharedMemory.shared().store
        array = np.arange(2 * MIB, dtype=np.int64)
        channel.put({"array": array, "small": array[:3]})
        assert server.stats().memory["lent"] == 1
        item = channel.get()
        assert np.array_equal(item["array"], array)
        wait_until(lambda: channel.stats().bytes == 0)
        assert store.stats()["lent"] == 1, "the view still holds the segment"
        del item
        gc.collect()
        wait_until(lambda: store.stats()["lent"] == 0)

    def test_small_puts_do_not_overtake_large_ones(self, channel):
        handles = []
        for number in range(10):
            handles.append(channel.put(np.full(MIB if number % 3 == 0 else 4, number, np.uint8), async_op=True))
        assert [int(channel.get()[0]) for _ in range(10)] == list(range(10))
        assert all(handle.wait(60) is None for handle in handles)

    def test_a_full_queue_holds_large_items_back_before_they_are_written(self, connect, server):
        channel = Channel.create("one", maxsize=1, client=connect())
        channel.put(np.zeros(2 * MIB))
        waiting = channel.put(np.ones(2 * MIB), async_op=True)
        channel.qsize()
        assert server.stats().memory["lent"] == 1 and not waiting.done()
        assert channel.get()[0] == 0
        assert waiting.wait(60) is None and channel.get()[0] == 1

    def test_copies_for_several_keys_lie_in_one_segment_until_the_last_is_gone(self, channel, server):
        array, store, keys = np.arange(MIB, dtype=np.uint8), ProcessSharedMemory.shared().store, ["a", "b", "c"]
        request = PutRequest(item=array, weight=0.0, key="a", timeout=60.0)
        channel._backend.put_copies(request, keys).result(60)
        assert server.stats().memory["lent"] == 1
        for left, key in ((1, "a"), (1, "b"), (0, "c")):
            found = channel.get(key=key, timeout=60)
            assert np.array_equal(found, array)
            del found
            wait_until(lambda n=left: gc.collect() >= 0 and store.stats()["lent"] == n)
        wait_until(lambda: channel.stats().bytes == 0)

    def test_copies_wait_for_room_under_each_key_and_leave_none_when_they_are_late(self, connect, server, clock):
        channel, array = Channel.create("one", maxsize=1, client=connect()), np.zeros(MIB, np.uint8)
        channel.put("first", key="b")
        request = PutRequest(item=array, weight=0.0, key="a", timeout=5.0)
        late = channel._backend.put_copies(request, ["a", "b"])
        wait_until(lambda: server.stats().memory["lent"] == 1)
        clock.now += 6
        channel.qsize()
        with pytest.raises(DeadlineExceeded):
            late.result(60)
        wait_until(lambda: server.stats().memory["lent"] == 0)
        assert channel.get(key="b", timeout=60) == "first"
        with pytest.raises(ChannelEmpty):
            channel.get_nowait(key="a")

    def test_without_shared_memory_they_go_by_socket(self, server, connect, monkeypatch):
        monkeypatch.setattr(tokens, "shares_memory", lambda proof: False)
        channel = Channel.create("s", client=connect())
        array = np.arange(MIB, dtype=np.int64)
        channel.put(array)
        assert np.array_equal(channel.get(), array) and server.stats().memory["lent"] == 0

    def test_an_item_over_max_bytes_is_refused(self, connect):
        channel = Channel.create("b", max_bytes=MIB, client=connect())
        for async_op in (False, True):
            with pytest.raises(ValueError, match="holds at most 1048576; raise max_bytes"):
                channel.put(np.zeros(MIB), async_op=async_op)
        assert channel.stats().bytes == 0

    def test_a_segment_in_a_put_that_reserved_no_room_is_refused(self, channel):
        part = SegmentPart(segment="rljob-u1-1-1", generation=1, nbytes=MIB)
        rpc = channel._backend._client.rpc
        with pytest.raises(ConfigError, match="reserve room for it"):
            rpc.call_sync("put", "c", "default_queue", 0.0, [part], 5.0, False)
        room = rpc.call_sync("reserve", "c", "default_queue", [MIB], 5.0, False, [True])
        with pytest.raises(InfrastructureError, match="not lent to its producer"):
            rpc.call_sync("hand_over", room.ticket, 0.0, [part])
        assert channel.stats().bytes == 0

    @pytest.mark.parametrize(("offset", "nbytes"), [(1, MIB), (-1, MIB), (0, MIB + 1)])
    def test_a_part_outside_of_its_segment_is_refused(self, channel, offset, nbytes):
        rpc = channel._backend._client.rpc
        room = rpc.call_sync("reserve", "c", "default_queue", [nbytes], 5.0, False, [False])
        part = rpc.call_sync("allocate", "c", MIB)
        with pytest.raises(InfrastructureError, match="not lent to its producer"):
            rpc.call_sync("hand_over", room.ticket, 0.0, [replace(part, offset=offset, nbytes=nbytes)])
        assert channel.stats().bytes == 0


@pytest.fixture
async def remote(server):
    """A channel for coroutines."""
    client = await asyncio.to_thread(ChannelClient, server.address)
    yield await asyncio.to_thread(lambda: Channel.create("a", client=client))
    client.close()


class TestAsync:
    async def test_coroutines(self, remote):
        getting = asyncio.create_task(remote.get_async())
        await remote.put_async(np.zeros(MIB, np.uint8))
        assert (await getting).nbytes == MIB
        for number in range(3):
            await remote.put_async(number, weight=1)
        await asyncio.to_thread(remote.close)
        assert await remote.get_batch_async(2) == [0, 1] and await remote.get_some_async(9) == [2]
        with pytest.raises(ChannelClosed):
            await remote.get_async()

    @pytest.mark.parametrize("moment", ["waiting", "answered"])
    async def test_a_cancelled_get_returns_its_item_to_the_head(self, remote, moment):
        """`answered`: the item is on its way, or here already, when the task is cancelled."""
        for round_ in range(10):
            getting = asyncio.create_task(remote.get_async())
            await asyncio.sleep(0.01)
            if moment == "answered":
                first = remote.put(f"{round_} first", async_op=True)
                second = remote.put(f"{round_} second", async_op=True)
                while not second.done():  # holds the loop: the answer to `getting` is here, its task has not run
                    time.sleep(0.002)
            getting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getting
            if moment == "waiting":
                first = remote.put(f"{round_} first", async_op=True)
                await remote.put_async(f"{round_} second")
            await first.async_wait(60)
            assert await remote.get_async(timeout=60) == f"{round_} first"
            assert await remote.get_async(timeout=60) == f"{round_} second"
        assert (await asyncio.to_thread(remote.stats)).depth == 0

    async def test_sync_faces_refuse_the_event_loop_and_do_nothing(self, remote):
        for face in (lambda: remote.put(1), remote.get, remote.qsize, remote.stats):
            with pytest.raises(RuntimeError, match="event-loop thread"):
                face()
        assert (await asyncio.to_thread(remote.stats)).puts == 0


class TestMembers:
    def test_a_client_that_leaves_returns_what_it_has_not_received_at_once(self, connect):
        leaving, staying = connect(identity(rank=0)), connect(identity(rank=1))
        channel = Channel.create("c", client=staying)
        for item in "xy":
            channel.put(item)
        taken = Channel.connect("c", client=leaving).get(async_op=True)
        wait_until(taken.done)
        assert channel.get() == "y"
        leaving.close()
        assert channel.get(timeout=60) == "x" and channel.stats().redelivered == 1

    def test_a_newer_incarnation_replaces_the_older_one(self, connect):
        channel = Channel.create("c", client=connect(identity(attempt=0)))
        channel.put("a")
        old = channel.get(async_op=True)
        wait_until(old.done)
        again = Channel.connect("c", client=connect(identity(attempt=1)))
        assert again.get(timeout=60) == "a"

    def test_a_lost_producer_is_named(self, connect):
        producer = connect(identity("actor", rank=2))
        channel = Channel.create("c", client=connect())
        mine = Channel.connect("c", client=producer)
        mine.register_producer()
        mine.put("accepted")
        producer.close()
        assert channel.get(timeout=60) == "accepted"
        with pytest.raises(ProducerLost, match="actor:2"):
            channel.get(timeout=60)

    def test_a_process_may_have_several_producers(self, connect):
        channel = Channel.create("c", client=connect(identity("actor")))
        for _ in range(2):
            channel.register_producer()
        assert channel.stats().producers == ("actor:0",)
        channel.done_producing()
        channel.put("of the other")
        channel.done_producing()
        channel.done_producing()  # of nobody: without effect
        assert channel.get() == "of the other"
        with pytest.raises(ChannelClosed):
            channel.put(1)

    def test_older_epochs_are_fenced(self):
        server = ChannelServer("tcp://127.0.0.1:0", identity=identity("channel", epoch=1)).start()
        client = ChannelClient(server.address, None, identity(epoch=0))
        with pytest.raises(EpochFenced):
            Channel.create("c", client=client)
        client.close()
        server.close()


class TestTransportLosses:
    def test_items_and_receipts_survive_a_broken_connection(self, connect):
        client = connect()
        channel = Channel.create("c", client=client)
        channel.put("a")
        handle = channel.get(async_op=True)
        wait_until(handle.done)
        _cut(client)
        channel.put("b")
        assert handle.wait() == "a" and channel.get(timeout=60) == "b"
        wait_until(lambda: channel.stats().bytes == 0)

    def test_a_waiting_get_survives_a_broken_connection(self, connect):
        client = connect()
        channel = Channel.create("c", client=client)
        waiting = channel.get(async_op=True)
        channel.qsize()
        _cut(client)
        Channel.connect("c", client=connect()).put("x")
        assert waiting.wait(60) == "x"


def _cut(client):
    """Break the TCP connection under a client and let it reconnect."""
    connection = client.rpc._connection

    def cut():
        connection._socket.disconnect(connection.address)
        connection._socket.connect(connection.address)

    connection._io.run(cut)


class TestRoles:
    def test_members_may_not_use_the_runners_methods(self, tmp_path):
        for name, text in generate_keys(["runner", "channel", "rollout"]).items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o400)
        server = ChannelServer(
            "tcp://127.0.0.1:0", curve.KeyRing(tmp_path, "channel"), identity=identity("channel")
        ).start()
        rollout = ChannelClient(server.address, curve.KeyRing(tmp_path, "rollout"), identity())
        channel = Channel.create("c", client=rollout)
        channel.put(np.arange(100_000))
        assert channel.get().sum() == np.arange(100_000).sum()
        with pytest.raises(ConfigError, match="role rollout may not call 'server_stats'"):
            rollout.rpc.call_sync("server_stats")
        for forbidden, method in ((channel.close, "close"), (channel.register_producer, "register")):
            with pytest.raises(ConfigError, match=f"role rollout may not call '{method}'"):
                forbidden()
        rollout.close()
        server.close()
