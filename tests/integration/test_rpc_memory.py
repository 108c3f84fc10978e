"""RPC over shared memory, and the end of clients and servers: real sockets, real segments."""

import gc
import threading

import numpy as np
import pytest

from rl_core.api.errors import (
    ConfigError,
    InfrastructureError,
    RemoteError,
    WorkerLost,
)
from rl_core.launch.ports import free_ports
from rl_core.transports import shared_memory
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient, RpcServer


class TestSharedMemory:
    def test_large_arrays_travel_by_segments_and_come_back(self, client, server):
        client.call_sync("add", 1)
        assert client.shares_memory
        big = np.arange(300_000, dtype=np.float64)
        again = client.call_sync("echo", {"big": big, "small": big[:10]})
        assert np.array_equal(again["big"], big) and np.array_equal(again["small"], big[:10])
        assert client.counters["shared_memory"] == 1 and server.counters["shared_memory"] == 1

    def test_segments_are_given_back_when_nobody_looks_any_more(self, client):
        store = SharedMemory.shared().store
        before = store.stats()["lent"]
        client.call_sync("add", 1)
        gc.collect()
        held = [client.call_sync("echo", np.zeros(400_000)) for _ in range(3)]
        assert store.stats()["lent"] >= 3
        held.clear()
        # an error's traceback holds the handler's arguments until the collector finds the cycle
        _until(lambda: gc.collect() >= 0 and store.stats()["lent"] <= before)

    def test_segments_of_calls_that_were_given_up_come_back(self, client, service):
        store = SharedMemory.shared().store
        before = store.stats()["lent"]  # the store is the process's: other tests' segments may be out
        client.call_sync("add", 1)
        service.release.set()
        with pytest.raises(RemoteError):
            client.call_sync("add", np.zeros(400_000), c=1)
        with pytest.raises(ConfigError):
            client.call_sync("nothing", np.zeros(400_000))
        future = client.call_future("echo", np.zeros(400_000))
        future.cancel()
        client.call_sync("add", 1)
        # an error's traceback holds the handler's arguments until the collector finds the cycle
        _until(lambda: gc.collect() >= 0 and store.stats()["lent"] <= before)

    def test_calls_cancelled_while_they_queue_give_back_memory_and_their_place(self, service):
        """One place, held by `block`: the others are cancelled before they begin, in a thread and on the loop."""
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=1).start()
        client = RpcClient(server.address)
        client.call_sync("add", 1)
        store = SharedMemory.shared().store
        before = store.stats()["lent"]
        blocked = client.call_future("block")
        assert service.started.wait(60)
        queued = [client.call_future(method, np.zeros(400_000)) for method in ("add", "add_async", "echo")]
        assert all(future.cancel() for future in queued)
        _until(lambda: server.counters["calls"] == 5)
        service.release.set()
        assert blocked.result(60) == 1
        assert client.call_sync("add_async", 1, timeout=60) == 1
        _until(lambda: gc.collect() >= 0 and store.stats()["lent"] <= before)
        client.close()
        server.close()

    def test_a_full_store_falls_back_to_the_socket_and_counts(self, client, monkeypatch):
        client.call_sync("add", 1)
        monkeypatch.setattr(SharedMemory.shared().store, "lend", lambda size, holder: None)
        big = np.arange(300_000, dtype=np.float64)
        assert np.array_equal(client.call_sync("echo", big), big)
        assert client.counters["shared_memory_full"] == 1

    def test_it_is_not_assumed(self, service, monkeypatch):
        """A peer that cannot read our token file gets everything by socket."""
        monkeypatch.setattr(shared_memory, "readable", lambda shown, **options: False)
        server = RpcServer("tcp://127.0.0.1:0", service).start()
        client = RpcClient(server.address)
        assert client.call_sync("nbytes", np.zeros(400_000)) == 3_200_000
        assert not client.shares_memory and client.counters["shared_memory"] == 0
        client.close()
        server.close()


def _until(condition):
    """Wait for what other threads do, with a bound."""
    waited = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("did not happen within 30 s")


class TestEnds:
    def test_closing_the_client_fails_its_calls(self, client, service):
        future = client.call_future("block")
        assert service.started.wait(60)
        client.close()
        with pytest.raises(InfrastructureError, match="the client was closed"):
            future.result(60)
        with pytest.raises(InfrastructureError, match="the client was closed"):
            client.call_sync("add", 1)

    def test_a_member_declared_lost_fails_its_calls_at_once(self, client, service):
        future = client.call_future("block")
        assert service.started.wait(60)
        client.fail("declared lost by the hub")
        with pytest.raises(WorkerLost, match="declared lost by the hub"):
            future.result(60)

    def test_a_server_that_went_away_is_a_lost_worker_and_idempotent_calls_find_the_next(self, service, monkeypatch):
        server = RpcServer(f"tcp://127.0.0.1:{free_ports().hub}", service).start()
        client = RpcClient(server.address)
        once = client.call_future("block", timeout=60)
        again = client.call_future("block", timeout=60, idempotent=True)
        assert service.started.wait(60)
        server.close()
        with pytest.raises(WorkerLost, match="whether it ran is unknown"):
            once.result(60)
        service.release.set()
        replaced = RpcServer(server.address, {"block": lambda: "from the next"}).start()
        assert again.result(60) == "from the next"
        client.close()
        replaced.close()
