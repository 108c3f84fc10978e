"""A hub with real sockets and members that only say hello: who hears of whom, and in which order."""

import queue

import pytest

from rl_core.api.identity import Identity
from rl_core.transports.rpc import RpcClient
from rl_core.workers.hub import Hub
from rl_core.workers.member import WIRE_VERSION


def identity(role, rank=0):
    return Identity(
        job="j", namespace="default", uid="u", epoch=0, role=role, pod=f"j-{role}-{rank}", pod_index=rank,
        group=role, rank=rank, world_size=2,
    )  # fmt: skip


def hello(role="env", rank=0):
    return {
        "uid": "u", "epoch": 0, "role": role, "group": role, "rank": rank, "pod": f"j-{role}-{rank}", "pid": 10 + rank,
        "incarnation": [0, 0], "address": f"tcp://127.0.0.1:{9000 + rank}", "wire_version": WIRE_VERSION,
    }  # fmt: skip


@pytest.fixture
def hub():
    made = Hub(identity=identity("runner"), bind="tcp://127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture
def member(hub):
    """A client that speaks for env:0, connected once the hub has started."""
    clients = []

    def connect():
        clients.append(RpcClient(hub.address, identity=identity("env"), service="hub"))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_listeners_hear_each_change_in_the_order_they_were_added_and_one_that_fails_stops_no_other(hub, member, caplog):
    heard = queue.SimpleQueue()

    def broken(one):
        heard.put(("broken", one.name))
        raise ValueError("a bug")

    hub.listen(joined=broken)
    hub.listen(joined=lambda one: heard.put(("joined", one.name)), lost=lambda one, why: heard.put((one.name, why)))
    hub.listen(lost=lambda one, why: heard.put(("last", one.name)))
    hub.start()
    client = member()
    client.call_sync("hello", hello(), timeout=30)
    client.call_sync("goodbye", "env:0", [0, 0], timeout=30)
    assert [heard.get(timeout=30) for _ in range(4)] == [
        ("broken", "env:0"),
        ("joined", "env:0"),
        ("env:0", "it drained and said goodbye"),
        ("last", "env:0"),
    ]
    assert "joined listener for env:0 failed" in caplog.text


def test_a_listener_that_comes_after_the_start_is_refused_because_it_would_miss_members(hub):
    hub.start()
    with pytest.raises(RuntimeError, match=r"before hub\.start"):
        hub.listen(joined=print)
