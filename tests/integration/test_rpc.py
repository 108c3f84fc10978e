"""RPC over real sockets: results, typed errors, deadlines, cancellation, streams, at most once, epochs, roles, memory."""

import asyncio
import gc
import threading

import numpy as np
import pytest
import zmq

from rl_core.api.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EpochFenced,
    InfrastructureError,
    RemoteError,
    WorkerLost,
)
from rl_core.api.identity import Identity
from rl_core.transports import curve, frames, rpc_wire, shared_memory
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient, RpcServer, current_caller


def identity(role, *, rank=0, epoch=0, uid="u1", attempt=0):
    return Identity(
        job="j", namespace="n", uid=uid, epoch=epoch, role=role, pod=f"j-{role}-{rank}", pod_index=rank, group=role, rank=rank,
        world_size=1, attempt=attempt,
    )  # fmt: skip


class Service:
    """Handlers of all kinds."""

    def __init__(self):
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self.runs = 0
        self.threads = set()

    def add(self, a, b=0):
        return a + b

    async def add_async(self, a, b=0):
        await asyncio.sleep(0)
        return a + b

    def echo(self, value):
        return value

    def raise_error(self, kind, text):
        raise {"data": DataError, "config": ConfigError, "value": ValueError, "exit": SystemExit}[kind](text)

    def unsendable(self):
        return object()

    def block(self):
        self.runs += 1
        self.started.set()
        self.release.wait(20)
        return self.runs

    async def hang(self):
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def count(self, n):
        for number in range(n):
            yield number

    def count_sync(self, n):
        yield from range(n)

    async def endless(self):
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            self.cancelled.set()

    async def broken_stream(self):
        yield 1
        raise DataError("bad row")

    def who(self):
        return current_caller()

    def remember_thread(self):
        self.threads.add(threading.current_thread().name)

    def nbytes(self, array):
        return array.nbytes

    def _private(self):
        return "secret"


@pytest.fixture
def service():
    service = Service()
    yield service
    service.release.set()


@pytest.fixture
def server(service):
    server = RpcServer("tcp://127.0.0.1:0", service).start()
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = RpcClient(server.address)
    yield client
    client.close()


class TestCalls:
    def test_sync_and_async_handlers_answer_sync_calls(self, client):
        assert client.call_sync("add", 1, b=2) == 3
        assert client.call_sync("add_async", 1, b=2) == 3

    async def test_and_awaited_ones(self, client):
        assert await client.call("add", 1, b=2) == 3
        assert await asyncio.gather(*(client.call("add_async", number, 1) for number in range(200))) == list(
            range(1, 201)
        )

    def test_futures_and_many_threads_share_a_client(self, client):
        results = {}

        def work(number):
            results[number] = client.call_future("add", number, 1).result(20)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert results == {number: number + 1 for number in range(20)}

    async def test_call_sync_refuses_an_event_loop_thread(self, client):
        with pytest.raises(RuntimeError, match="event-loop thread"):
            client.call_sync("add", 1)

    def test_user_code_never_runs_on_the_socket_loop(self, client, service):
        client.call_sync("remember_thread")
        assert service.threads and not any(name == "rljob-io" for name in service.threads)

    def test_a_client_may_connect_before_its_server_is_there(self, service):
        probe = RpcServer("tcp://127.0.0.1:0", {}).start()
        address = probe.address
        probe.close()
        client = RpcClient(address)
        future = client.call_future("add", 1, 2, timeout=20)
        server = RpcServer(address, service).start()
        assert future.result() == 3
        client.close()
        server.close()


class TestErrors:
    def test_public_errors_keep_their_type_others_become_remote_errors(self, client):
        with pytest.raises(DataError, match="bad sample") as caught:
            client.call_sync("raise_error", "data", "bad sample")
        assert "raise_error" in caught.value.__notes__[0] and "Traceback" in caught.value.__notes__[0]
        with pytest.raises(RemoteError, match="raised ValueError: odd") as remote:
            client.call_sync("raise_error", "value", "odd")
        assert "raise_error at" in str(remote.value) and "Traceback" in str(remote.value)
        with pytest.raises(RemoteError, match="SystemExit"):
            client.call_sync("raise_error", "exit", "1")

    def test_unknown_and_private_methods_are_refused_by_name(self, client):
        with pytest.raises(ConfigError, match="no method 'nothing'; it serves add, add_async"):
            client.call_sync("nothing")
        with pytest.raises(ConfigError, match="no method '_private'"):
            client.call_sync("_private")

    def test_what_cannot_travel_fails_where_it_is_sent(self, client):
        with pytest.raises(TypeError, match=r"builtins.object at \[0\]\[0\] cannot travel"):
            client.call_sync("echo", object())
        with pytest.raises(RemoteError, match="TypeError: builtins.object at the root cannot travel"):
            client.call_sync("unsendable")

    def test_wrong_arguments_are_the_callers_error(self, client):
        with pytest.raises(RemoteError, match="unexpected keyword argument 'c'"):
            client.call_sync("add", 1, c=3)


class TestDeadlines:
    def test_a_deadline_tells_method_peer_seconds_and_that_it_was_received(self, client, server, service):
        with pytest.raises(DeadlineExceeded) as caught:
            client.call_sync("block", timeout=0.1)
        for word in ("block", server.address, "0.1 s", "received it and is still working"):
            assert word in str(caught.value)

    def test_long_calls_are_confirmed_too(self, client, service):
        with pytest.raises(DeadlineExceeded, match="received it"):
            client.call_sync("block", timeout=2.5 * rpc_wire.RECEIPT_SECONDS)

    def test_or_that_the_server_never_answered(self):
        client = RpcClient("tcp://127.0.0.1:9")
        with pytest.raises(
            DeadlineExceeded, match=r"add at tcp://127.0.0.1:9 .*0\.05 s; it was not sent: the server never answered"
        ):
            client.call_sync("add", timeout=0.05)
        client.close()

    async def test_the_handler_is_cancelled_at_the_deadline(self, client, service):
        with pytest.raises(DeadlineExceeded):
            await client.call("hang", timeout=0.1)
        assert await asyncio.to_thread(service.cancelled.wait, 10)

    async def test_cancelling_the_caller_cancels_the_handler(self, client, service):
        call = asyncio.create_task(client.call("hang"))
        assert await asyncio.to_thread(service.started.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(service.cancelled.wait, 10)

    def test_cancelling_a_future_cancels_the_handler(self, client, service):
        future = client.call_future("hang")
        assert service.started.wait(10)
        assert future.cancel()
        assert service.cancelled.wait(10)

    async def test_a_cancelled_call_that_waits_for_room_never_starts(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=1).start()
        client = RpcClient(server.address)
        blocking = asyncio.create_task(client.call("block"))
        assert await asyncio.to_thread(service.started.wait, 10)
        queued = asyncio.create_task(client.call("block"))
        await self.settled(client)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        await self.settled(client)
        service.release.set()
        assert await blocking == 1
        assert await client.call("echo", 1) == 1
        assert service.runs == 1
        client.close()
        server.close()

    async def settled(self, client):
        """Return when the server has taken up all that was sent before: unknown methods are answered without a handler."""
        with pytest.raises(ConfigError):
            await client.call("nothing")


class TestStreams:
    @pytest.mark.parametrize("method", ["count", "count_sync"])
    async def test_items_arrive_in_order_and_the_stream_ends(self, client, method):
        assert [item async for item in client.stream(method, 100)] == list(range(100))

    async def test_the_server_stays_within_the_window_of_a_slow_consumer(self, client):
        stream = client.stream("endless")
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await asyncio.sleep(0.2)
        assert await anext(stream) == 3
        await stream.aclose()

    async def test_leaving_early_cancels_the_generator(self, client, service):
        stream = client.stream("endless")
        async for item in stream:
            if item == 2:
                break
        await stream.aclose()
        assert await asyncio.to_thread(service.cancelled.wait, 10)

    async def test_an_error_in_the_stream_is_raised_after_its_items(self, client):
        seen = []
        with pytest.raises(DataError, match="bad row"):
            async for item in client.stream("broken_stream"):
                seen.append(item)
        assert seen == [1]


class TestCredit:
    async def test_more_calls_than_credit_wait_and_all_finish(self, client):
        results = await asyncio.gather(*(client.call("add_async", number) for number in range(3 * rpc_wire.MAX_CALLS)))
        assert results == list(range(3 * rpc_wire.MAX_CALLS))

    def test_a_call_without_credit_tells_so_at_its_deadline(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=200).start()
        client = RpcClient(server.address)
        blocked = [client.call_future("block", timeout=20) for _ in range(rpc_wire.MAX_CALLS)]
        with pytest.raises(DeadlineExceeded, match=f"not sent: {rpc_wire.MAX_CALLS} other calls are in flight"):
            client.call_sync("add", 1, timeout=0.2)
        service.release.set()
        assert len([future.result(20) for future in blocked]) == rpc_wire.MAX_CALLS
        client.close()
        server.close()


class RawPeer:
    """A DEALER that speaks the protocol by hand, to send what our client never would."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    def send(self, kind, obj, number=None, *, epoch=None, method=None, options=None):
        self.socket.send_multipart(
            frames.encode_message(
                kind, obj, epoch=epoch, request_id=number, sender=None, method=method, options=options
            )
        )

    def receive(self, *kinds):
        while True:
            assert self.socket.poll(10_000), "no answer"
            message = frames.decode_message(self.socket.recv_multipart())
            if message.kind in kinds:
                return message

    def hello(self, described=None):
        self.send("hello", {"identity": described, "token": None, "pending": []})
        return self.receive("welcome", "refused")

    def close(self):
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def raw(server):
    peer = RawPeer(server.address)
    yield peer
    peer.close()


class TestAtMostOnce:
    def test_a_request_that_arrives_twice_runs_once(self, raw, server, service):
        raw.hello()
        service.release.set()
        for _ in range(3):
            raw.send("call", [[], {}], 7, method="block")
        assert raw.receive("reply").obj == 1
        raw.send("call", [[], {}], 7, method="block")
        raw.send("call", [[5], {}], 8, method="echo")
        assert raw.receive("reply").obj == 5
        assert service.runs == 1 and server.counters["duplicates"] == 3

    def test_the_last_1024_ids_are_remembered(self, raw, server, service):
        raw.hello()
        service.release.set()
        raw.send("call", [[], {}], 1, method="block")
        raw.receive("reply")
        for number in range(2, 1025):
            raw.send("call", [[0], {}], number, method="echo")
            raw.receive("reply")
        raw.send("call", [[], {}], 1, method="block")
        raw.send("call", [[0], {}], 2000, method="echo")
        raw.receive("reply")
        assert service.runs == 1

    def test_after_a_reconnection_the_server_tells_what_it_knows(self, raw, service):
        raw.hello()
        raw.send("call", [[], {}], 5, method="block")
        assert service.started.wait(10)
        raw.send("call", [[0], {}], 6, method="echo")
        raw.receive("reply")
        raw.send("hello", {"identity": None, "token": None, "pending": [5, 6, 7]})
        welcome = raw.receive("welcome").obj
        assert welcome["running"] == [5] and welcome["finished"] == [6]


class TestHostileMessages:
    def test_nothing_but_frames_is_read_and_the_server_goes_on(self, raw, server, client):
        raw.hello()
        for parts in ([b""], [b"garbage"], [b"\x01\x93"], [b"\x02abc"], [b"x"] * 50):
            raw.socket.send_multipart(parts)
        raw.send("call", "not arguments", 1, method="echo")
        assert raw.receive("error").obj["type"] == "FrameError"
        raw.send("hello", "nonsense")
        raw.send("credit", "nonsense", 99)
        raw.send("release", [["rljob-x-1-2", 5]])
        assert client.call_sync("add", 1, 2) == 3
        assert server.counters["malformed"] >= 6

    def test_who_did_not_say_hello_is_asked_to(self, raw, service):
        raw.send("call", [[], {}], 1, method="block")
        assert raw.receive("who").kind == "who"
        assert service.runs == 0


class TestEpochs:
    def test_older_epochs_are_fenced_and_counted_and_newer_are_served(self):
        server = RpcServer(
            "tcp://127.0.0.1:0",
            {"f": lambda: 1, "hello": lambda: 2},
            identity=identity("runner", epoch=3),
            unfenced=frozenset({"hello"}),
        ).start()
        client = RpcClient(server.address, identity=identity("rollout", epoch=2))
        with pytest.raises(EpochFenced, match="came from epoch 2 of rollout:0, runner:0 at .* is at epoch 3"):
            client.call_sync("f")
        assert client.call_sync("hello") == 2, "hello answers older epochs, so that they learn the new one"
        assert server.counters["fenced"] == 1
        client.set_epoch(4)
        with pytest.raises(EpochFenced, match="from epoch 3, this process is at epoch 4"):
            client.call_sync("f")
        server.set_epoch(4)
        assert client.call_sync("f") == 1
        client.close()
        server.close()

    def test_another_job_is_refused(self):
        server = RpcServer("tcp://127.0.0.1:0", {"f": lambda: 1}, identity=identity("runner")).start()
        client = RpcClient(server.address, identity=identity("rollout", uid="other"))
        with pytest.raises(DeadlineExceeded, match=r"this is job j \(u1\), not j \(other\)"):
            client.call_sync("f", timeout=0.5)
        client.close()
        server.close()


class TestCallers:
    def test_a_handler_learns_its_caller(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, identity=identity("runner")).start()
        client = RpcClient(server.address, identity=identity("rollout", rank=3, attempt=2))
        assert client.call_sync("who") == {
            "job": "j",
            "uid": "u1",
            "epoch": 0,
            "role": "rollout",
            "group": "rollout",
            "rank": 3,
            "incarnation": (2, 0),
        }
        assert client.peer.startswith("runner:0 at tcp://")
        client.close()
        server.close()

    def test_an_anonymous_caller_is_none(self, client):
        assert client.call_sync("who") is None

    def test_each_role_may_call_its_methods_only(self, service):
        allowed = {"rollout": frozenset({"add"}), "runner": frozenset({"add", "echo"})}
        server = RpcServer("tcp://127.0.0.1:0", service, identity=identity("runner"), allowed=allowed).start()
        rollout, runner = (RpcClient(server.address, identity=identity(role)) for role in ("rollout", "runner"))
        assert rollout.call_sync("add", 1) == 1 and runner.call_sync("echo", 2) == 2
        with pytest.raises(ConfigError, match="role rollout may not call 'echo'"):
            rollout.call_sync("echo", 1)
        assert server.counters["refused_methods"] == 1
        for closing in (rollout, runner, server):
            closing.close()


@pytest.fixture
def keys(tmp_path):
    for name, text in curve.generate_keys(["runner", "rollout", "env", "actor"]).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o400)
    return lambda role: curve.KeyRing(tmp_path, role)


class TestCurve:
    @pytest.fixture
    def hub(self, keys, service):
        hub = RpcServer("tcp://127.0.0.1:0", service, keys("runner"), identity("runner")).start()
        yield hub
        hub.close()

    @pytest.fixture
    def env(self, keys, service):
        env = RpcServer("tcp://127.0.0.1:0", service, keys("env"), identity("env")).start()
        yield env
        env.close()

    def test_allowed_roles_connect_and_their_role_is_proven(self, hub, keys):
        client = RpcClient(hub.address, keys("rollout"), identity("rollout"), service="hub")
        assert client.call_sync("add", 1, 2) == 3
        assert client.call_sync("who")["role"] == "rollout"
        client.close()

    def test_a_role_that_is_not_listed_is_refused_and_counted(self, env, keys):
        """Actors may not call envs."""
        before = env.refused()
        client = RpcClient(env.address, keys("actor"), identity("actor"), service="env")
        with pytest.raises(DeadlineExceeded, match="not sent: the server refused this process's key"):
            client.call_sync("add", 1, timeout=1)
        assert env.refused() > before
        client.close()

    def test_a_stranger_is_refused_and_counted(self, hub, keys, tmp_path_factory):
        folder = tmp_path_factory.mktemp("stranger")
        for name, text in curve.generate_keys(["rollout"]).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o400)
        (folder / "runner.public").write_bytes(keys("runner").public)
        (folder / "runner.public").chmod(0o400)
        before = hub.refused()
        client = RpcClient(hub.address, curve.KeyRing(folder, "rollout"), identity("rollout"), service="hub")
        with pytest.raises(DeadlineExceeded):
            client.call_sync("add", 1, timeout=1)
        assert hub.refused() > before
        client.close()

    def test_without_keys_nothing_gets_through(self, hub):
        client = RpcClient(hub.address, None, identity("runner"))
        with pytest.raises(DeadlineExceeded):
            client.call_sync("add", 1, timeout=0.7)
        client.close()

    def test_a_role_cannot_be_claimed(self, hub, keys):
        client = RpcClient(hub.address, keys("env"), identity("runner"), service="hub")
        with pytest.raises(DeadlineExceeded, match="the key is that of role env, the message says runner"):
            client.call_sync("add", 1, timeout=0.7)
        client.close()

    def test_a_supervisor_uses_the_key_of_its_pod(self, hub, keys):
        client = RpcClient(hub.address, keys("env"), identity("supervisor"), service="hub")
        assert client.call_sync("who")["role"] == "supervisor"
        client.close()

    def test_the_server_must_have_the_key_of_its_service(self, env, keys):
        client = RpcClient(env.address, keys("rollout"), identity("rollout"), service="hub")
        with pytest.raises(DeadlineExceeded):
            client.call_sync("add", 1, timeout=0.7)
        client.close()

    def test_identity_and_service_must_be_given_with_keys(self, keys):
        with pytest.raises(ConfigError, match="must have an identity"):
            RpcClient("tcp://127.0.0.1:1", keys("env"))
        with pytest.raises(ConfigError, match="pass service="):
            RpcClient("tcp://127.0.0.1:1", keys("env"), identity("env"))


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
        client.call_sync("add", 1)
        gc.collect()
        held = [client.call_sync("echo", np.zeros(400_000)) for _ in range(3)]
        assert store.stats()["lent"] >= 3
        held.clear()
        gc.collect()
        _until(lambda: store.stats()["lent"] == 0)

    def test_segments_of_calls_that_were_given_up_come_back(self, client, service):
        store = SharedMemory.shared().store
        client.call_sync("add", 1)
        service.release.set()
        with pytest.raises(RemoteError):
            client.call_sync("add", np.zeros(400_000), c=1)
        with pytest.raises(ConfigError):
            client.call_sync("nothing", np.zeros(400_000))
        future = client.call_future("echo", np.zeros(400_000))
        future.cancel()
        client.call_sync("add", 1)
        gc.collect()
        _until(lambda: store.stats()["lent"] == 0)

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
        assert service.started.wait(10)
        client.close()
        with pytest.raises(InfrastructureError, match="the client was closed"):
            future.result(10)
        with pytest.raises(InfrastructureError, match="the client was closed"):
            client.call_sync("add", 1)

    def test_a_member_declared_lost_fails_its_calls_at_once(self, client, service):
        future = client.call_future("block")
        assert service.started.wait(10)
        client.fail("declared lost by the hub")
        with pytest.raises(WorkerLost, match="declared lost by the hub"):
            future.result(10)

    def test_a_server_that_went_away_is_a_lost_worker_and_idempotent_calls_find_the_next(self, service, monkeypatch):
        server = RpcServer("tcp://127.0.0.1:0", service).start()
        client = RpcClient(server.address)
        once = client.call_future("block", timeout=20)
        again = client.call_future("block", timeout=20, idempotent=True)
        assert service.started.wait(10)
        server.close()
        with pytest.raises(WorkerLost, match="whether it ran is unknown"):
            once.result(20)
        service.release.set()
        replaced = RpcServer(server.address, {"block": lambda: "from the next"}).start()
        assert again.result(20) == "from the next"
        client.close()
        replaced.close()
