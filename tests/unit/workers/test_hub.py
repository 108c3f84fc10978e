"""A hub with real sockets and members that only say hello: who hears of whom, and in which order."""

import queue
import threading

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.messages.members import WIRE_VERSION, HelloAccepted, HelloReport, MemberId, MemberView
from rl_core.transports.rpc import RpcClient, inline
from rl_core.workers.hub import Hub


def identity(role, rank=0):
    return Identity(
        job="j", namespace="default", uid="u", epoch=0, role=role, pod=f"j-{role}-{rank}", pod_index=rank,
        group=role, rank=rank, world_size=2,
    )  # fmt: skip


def hello(role="env", rank=0, incarnation=(0, 0)):
    member = MemberView(
        name=f"{role}:{rank}", role=role, group=role, rank=rank, pod=f"j-{role}-{rank}", pid=10 + rank, host_token="",
        address=f"tcp://127.0.0.1:{9000 + rank}", incarnation=incarnation,
    )  # fmt: skip
    return HelloReport(wire_version=WIRE_VERSION, uid="u", epoch=0, member=member, registration=1)


ENV = MemberId(name="env:0", incarnation=(0, 0))


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

    hub.add_listeners(joined=broken)
    hub.add_listeners(
        joined=lambda one: heard.put(("joined", one.name)), lost=lambda one, why: heard.put((one.name, why))
    )
    hub.add_listeners(lost=lambda one, why: heard.put(("last", one.name)))
    hub.start()
    client = member()
    client.call_sync("hello", hello(), timeout=30)
    client.call_sync("goodbye", ENV, timeout=30)
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
        hub.add_listeners(joined=print)


def test_a_loss_is_heard_before_the_join_that_follows_it_whoever_finds_the_one_and_the_other(hub, member):
    """The runner gives a member up on its own thread while a newer process of that name says hello on another."""
    heard, found, go_on = queue.SimpleQueue(), threading.Event(), threading.Event()

    def hold(change):
        if change.kind == "lost":
            found.set()
            assert go_on.wait(30)

    hub.add_watcher(hold)
    hub.add_listeners(joined=lambda one: heard.put(one.incarnation), lost=lambda one, why: heard.put("lost"))
    hub.start()
    client = member()
    client.call_sync("hello", hello(), timeout=30)
    runner = threading.Thread(target=hub.declare_lost, args=(hub.get("env:0"), "it could not join"))
    runner.start()
    assert found.wait(30)
    joining = client.call_future("hello", hello(incarnation=(0, 1)), timeout=30)
    with pytest.raises(TimeoutError):
        joining.result(0.2)
    go_on.set()
    assert isinstance(joining.result(30), HelloAccepted)
    runner.join(30)
    assert [heard.get(timeout=30) for _ in range(3)] == [(0, 0), "lost", (0, 1)]


def test_a_hello_of_the_release_before_is_bad_input_and_not_a_crash(hub, member):
    hub.start()
    with pytest.raises(ConfigError, match="wire version"):
        member().call_sync("hello", {"wire_version": 1, "role": "env"}, timeout=30)


def test_a_handler_of_the_runner_may_answer_later_from_another_thread(hub, member):
    waiting = queue.SimpleQueue()

    @inline
    def lease(call, want):
        waiting.put((call, want))

    hub.add_handlers({"lease": lease}, role="rollout")
    hub.start()
    answer = member().call_future("lease", 2, timeout=30)
    call, want = waiting.get(timeout=30)
    assert want == 2 and not answer.done()
    call.reply(["a", "b"])
    assert answer.result(30) == ["a", "b"]


def test_an_error_of_one_look_for_silent_members_does_not_end_the_looks(hub, monkeypatch, caplog):
    looks, again = [], threading.Event()

    def sweep():
        looks.append(len(looks))
        if len(looks) == 1:
            raise ValueError("a bug")
        again.set()

    monkeypatch.setattr(hub, "_sweep_seconds", 0.001)
    monkeypatch.setattr(hub._membership, "sweep", sweep)
    hub.start()
    assert again.wait(30)
    assert "could not look for silent members" in caplog.text


def test_a_watcher_that_fails_hides_the_change_from_no_listener(hub, member, caplog):
    heard = queue.SimpleQueue()
    hub.add_watcher(lambda change: 1 / 0)
    hub.add_listeners(joined=lambda one: heard.put(one.name))
    hub.start()
    member().call_sync("hello", hello(), timeout=30)
    assert heard.get(timeout=30) == "env:0"
    assert "ZeroDivisionError" in caplog.text
