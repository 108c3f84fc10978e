"""Large arrays by RPC, who shares memory, and the end of clients and servers: real sockets."""

import numpy as np
import pytest

from rl_core.api.errors import (
    DeadlineExceeded,
    InfrastructureError,
    WorkerLost,
)
from rl_core.launch.ports import free_ports
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.sockets import IoThread


def test_large_arrays_travel_whole_both_ways(client):
    big = np.arange(1_300_001, dtype=np.float64)
    again = client.call_sync("echo", {"big": big, "small": big[:10], "text": "x" * big.nbytes})
    assert np.array_equal(again["big"], big) and np.array_equal(again["small"], big[:10])
    assert again["text"] == "x" * big.nbytes


@pytest.mark.parametrize("shared", [True, False], ids=["both", "server only"])
def test_memory_is_shared_where_both_ends_want_it(service, shared):
    server = RpcServer("tcp://127.0.0.1:0", service, share_memory=True).start()
    client = RpcClient(server.address, share_memory=shared)
    assert client.call_sync("add", 1) == 1
    assert client.shares_memory is shared
    client.close()
    server.close()


class TestEnds:
    def test_closing_the_client_fails_its_calls(self, client, service):
        future = client.call_future("block")
        assert service.started.wait(60)
        client.close()
        with pytest.raises(InfrastructureError, match="the client was closed"):
            future.result(60)
        with pytest.raises(InfrastructureError, match="the client was closed"):
            client.call_sync("add", 1)

    def test_a_callback_may_close_the_client_while_its_calls_end(self, client, service, caplog):
        futures = [client.call_future("block") for _ in range(3)]
        for future in futures:
            future.add_done_callback(lambda _: client.close())
        client.fail("declared lost by the hub")
        for future in futures:
            with pytest.raises(InfrastructureError, match="declared lost by the hub|the client was closed"):
                future.result(60)
        late = RpcClient("tcp://127.0.0.1:9")
        calls = [late.call_future("add", timeout=0.05) for _ in range(3)]
        for call in calls:
            call.add_done_callback(lambda _: late.close())
        for call in calls:
            with pytest.raises((DeadlineExceeded, InfrastructureError)):
                call.result(60)
        IoThread.shared().run(lambda: None)  # what it still had to do is done
        assert caplog.records == []

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
