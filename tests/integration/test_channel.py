"""Channels through a server over real sockets: contract, large items, order, cancellation, clock, members, roles."""

import asyncio
import gc
import time

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
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.transports import curve, frames, rpc_wire
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient

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
        wait_until(lambda: gc.collect() >= 0 and SharedMemory.shared().store.stats()["lent"] == 0)

    def test_they_lie_in_segments_of_the_server_and_are_freed(self, channel, server):
        store = SharedMemory.shared().store
        array = np.arange(2 * MIB, dtype=np.int64)  # too large for a segment lent in advance
        channel.put({"array": array, "small": array[:3]})
        assert server.stats()["memory"]["lent"] == 1
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
        assert server.stats()["memory"]["lent"] == 1 and not waiting.done()
        assert channel.get()[0] == 0
        assert waiting.wait(60) is None and channel.get()[0] == 1

    def test_a_second_item_goes_into_a_segment_lent_in_advance(self, channel, server):
        for number in range(5):
            channel.put(np.full(MIB, number, np.uint8))
        counts = server.stats()
        assert counts["memory"]["lent"] == 6, "five items and one segment for the next"
        assert counts["channels"]["c"]["bytes"] < 5.1 * MIB, "the segment in advance is nobody's item"
        assert [int(channel.get()[-1]) for _ in range(5)] == list(range(5))

    @pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "deleted"])
    def test_a_producer_taken_for_lost_cannot_write_into_what_it_was_lent(self, connect, server, mapped):
        client = connect(identity())
        channel = Channel.create("c", client=client)
        channel.put(np.zeros(MIB, np.uint8))
        ((name, _, size),) = client.uplink.spares._free
        if mapped:
            SharedMemory.shared().reader.view(name, 0, size)
        else:
            SharedMemory.shared().reader._maps.pop(name, None)
        (peer,) = server._rpc.peers()
        peer.link.lost()
        if mapped:
            with pytest.raises(InfrastructureError, match="taken for lost"):
                channel.put(np.ones(MIB, np.uint8))
        channel.put(np.full(MIB, 2, np.uint8))
        assert [int(channel.get()[0]) for _ in range(2)] == [0, 2]

    def test_without_shared_memory_they_go_by_socket(self, server, connect, monkeypatch):
        from rl_core.transports import rpc_connection

        monkeypatch.setattr(rpc_connection.shared_memory, "readable", lambda shown, **options: False)
        channel = Channel.create("s", client=connect())
        array = np.arange(MIB, dtype=np.int64)
        channel.put(array)
        assert np.array_equal(channel.get(), array) and server.stats()["memory"]["lent"] == 0

    def test_an_expired_lease_of_a_large_item_can_be_read_by_the_next(self, connect, clock):
        channel = Channel.create("l", lease_seconds=10, client=connect())
        channel.put(np.full(MIB, 3, np.uint8))
        first = channel.lease()
        clock.now += 11
        second = channel.lease()
        assert second.attempt == 2 and first.item[0] == second.item[0] == 3
        assert first.ack() is False and second.ack() is True

    @pytest.mark.parametrize("nbytes", [10, MIB])
    def test_items_put_together_are_leased_together(self, channel, server, nbytes):
        """Small ones in one message, large ones through segments; an answer ends the lease of its item."""
        channel.put_many([np.full(nbytes, value, np.uint8) for value in range(3)], weights=[4, 5, 6])
        before = server.stats()["transport"]["calls"]
        deliveries = channel.lease_many(8)
        assert server.stats()["transport"]["calls"] == before + 1
        assert [(delivery.item[0], delivery.item.nbytes, delivery.weight) for delivery in deliveries] == [
            (value, nbytes, value + 4) for value in range(3)
        ]
        channel.put(np.full(nbytes, 9, np.uint8), key="answers", ack=deliveries[1])
        assert [delivery.ack() for delivery in deliveries] == [True, False, True]
        assert channel.get("answers")[0] == 9

    def test_a_renewal_that_crosses_the_end_of_its_lease_warns_of_nothing(self, connect, caplog):
        client = connect()
        channel = Channel.create("crossed", lease_seconds=10, client=client)
        channel.put_many(["answered", "lost"])
        answered, lost = channel.lease_many(2)
        channel.put("answer", key="answers", ack=answered)
        client.leases._drop_stale([answered.token])  # what the server says to a renewal that arrives behind the answer
        assert "another consumer" not in caplog.text
        client.leases._drop_stale([lost.token])
        assert "another consumer has the item" in caplog.text

    def test_an_answer_that_is_not_accepted_leaves_the_lease(self, channel):
        channel.put("prompt")
        delivery = channel.lease()
        channel.close("answers")
        with pytest.raises(ChannelClosed):
            channel.put("answer", key="answers", ack=delivery)
        assert delivery.ack() is True

    def test_an_answer_through_another_server_is_refused(self, channel):
        local = Channel.create("l", local=True)
        local.put(1)
        with pytest.raises(ValueError, match="same channel server"):
            channel.put(1, ack=local.lease())

    def test_an_item_over_max_bytes_is_refused(self, connect):
        channel = Channel.create("b", max_bytes=MIB, client=connect())
        for async_op in (False, True):
            with pytest.raises(ValueError, match="holds at most 1048576; raise max_bytes"):
                channel.put(np.zeros(MIB), async_op=async_op)
        assert channel.stats().bytes == 0


class TestAsync:
    async def test_coroutines_and_deliveries(self, server):
        client = await asyncio.to_thread(ChannelClient, server.address)
        channel = await Channel.create_async("a", client=client)
        getting = asyncio.create_task(channel.get_async())
        await channel.put_async(np.zeros(MIB, np.uint8))
        assert (await getting).nbytes == MIB
        for number in range(3):
            await channel.put_async(number)
        await channel.close_async()
        seen = []
        for _ in range(3):
            async with await channel.lease_async() as delivery:
                seen.append(delivery.item)
        assert seen == [0, 1, 2]
        with pytest.raises(ChannelClosed):
            await channel.get_async()
        client.close()

    @pytest.mark.parametrize("moment", ["waiting", "answered"])
    async def test_a_cancelled_get_returns_its_item_to_the_head(self, server, moment):
        """`answered`: the item is on its way, or here already, when the task is cancelled."""
        client = await asyncio.to_thread(ChannelClient, server.address)
        channel = await Channel.create_async("a", client=client)
        for round_ in range(10):
            getting = asyncio.create_task(channel.get_async())
            await asyncio.sleep(0.01)
            if moment == "answered":
                first = channel.put(f"{round_} first", async_op=True)
                second = channel.put(f"{round_} second", async_op=True)
                while not second.done():  # holds the loop: the answer to `getting` is here, its task has not run
                    time.sleep(0.002)
            getting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getting
            if moment == "waiting":
                first = channel.put(f"{round_} first", async_op=True)
                await channel.put_async(f"{round_} second")
            await first.async_wait(60)
            assert await channel.get_async(timeout=60) == f"{round_} first"
            assert await channel.get_async(timeout=60) == f"{round_} second"
        stats = await channel.stats_async()
        assert stats.expired == 0 and stats.depth == 0
        client.close()

    async def test_sync_faces_refuse_the_event_loop_and_do_nothing(self, server):
        client = await asyncio.to_thread(ChannelClient, server.address)
        channel = await Channel.create_async("a", client=client)
        for face in (lambda: channel.put(1), channel.get, channel.qsize, channel.lease):
            with pytest.raises(RuntimeError, match="event-loop thread"):
                face()
        assert (await channel.stats_async()).puts == 0
        client.close()


class TestMembers:
    def test_a_client_that_leaves_returns_what_it_holds_at_once(self, connect):
        leaving, staying = connect(identity(rank=0)), connect(identity(rank=1))
        channel = Channel.create("c", client=staying)
        channel.put("x")
        delivery = Channel.connect("c", client=leaving).lease()
        leaving.close()
        again = channel.lease(timeout=60)
        assert again.item == "x" and again.attempt == 2
        del delivery

    def test_consumer_lost_returns_a_members_leases_at_once(self, connect, server):
        lost, other = connect(identity(rank=0)), connect(identity(rank=1))
        channel = Channel.create("c", client=other)
        for item in "ab":
            channel.put(item)
        first = Channel.connect("c", client=lost).lease()
        second = channel.lease()
        assert server.consumer_lost("rollout:0", (0, 0)) == 1
        again = channel.lease(timeout=60)
        assert again.item == "a" and again.attempt == 2
        assert first.ack() is False and second.ack() is True

    def test_the_runner_may_say_so_by_rpc(self, connect, server):
        lost = connect(identity(rank=0))
        channel = Channel.create("c", client=lost)
        channel.put("a")
        channel.lease()
        runner = RpcClient(server.address, identity=identity("runner"))
        assert runner.call_sync("consumer_lost", "rollout:0", (0, 0)) == 1
        assert runner.call_sync("server_stats")["channels"]["c"]["leases"] == 0
        runner.close()

    def test_a_newer_incarnation_replaces_the_older_one(self, connect):
        channel = Channel.create("c", client=connect(identity(attempt=0)))
        channel.put("a")
        old = channel.lease()
        again = Channel.connect("c", client=connect(identity(attempt=1))).lease(timeout=60)
        assert again.attempt == 2 and old.ack() is False

    def test_leases_are_renewed_while_their_delivery_lives(self, server, connect, clock):
        channel = Channel.create("c", lease_seconds=0.15, client=connect())
        channel.put("a")
        delivery = channel.lease()
        (leased,) = server._channels["c"]._out.values()
        for _ in range(4):  # the injected clock moves, the renewals come by real time
            clock.now += 0.1
            wait_until(lambda: leased.expires >= clock.now + 0.15)
        assert channel.stats().expired == 0 and delivery.ack() is True

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
        assert channel.stats().producers == ["actor:0"]
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
    def test_items_and_leases_survive_a_broken_connection(self, connect):
        client = connect()
        channel = Channel.create("c", client=client)
        channel.put("a")
        delivery = channel.lease()
        _cut(client)
        channel.put("b")
        assert delivery.ack() is True and channel.get(timeout=60) == "b"

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
        for name, text in curve.generate_keys(["runner", "channel", "rollout"]).items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o400)
        server = ChannelServer(
            "tcp://127.0.0.1:0", curve.KeyRing(tmp_path, "channel"), identity=identity("channel")
        ).start()
        rollout = ChannelClient(server.address, curve.KeyRing(tmp_path, "rollout"), identity())
        channel = Channel.create("c", client=rollout)
        channel.put(np.arange(100_000))
        assert channel.get().sum() == np.arange(100_000).sum()
        with pytest.raises(ConfigError, match="role rollout may not call 'consumer_lost'"):
            rollout.rpc.call_sync("consumer_lost", "rollout:1", (0, 0))
        for forbidden, method in ((channel.close, "close"), (channel.register_producer, "register")):
            with pytest.raises(ConfigError, match=f"role rollout may not call '{method}'"):
                forbidden()
        rollout.close()
        server.close()
