"""RPC over real sockets: results, typed errors, deadlines, cancellation, at most once, epochs, roles."""

import asyncio
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from rl_core.api.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EpochFenced,
    RemoteError,
)
from rl_core.launch.ports import free_ports
from rl_core.messages.rpc import Caller, Hello
from rl_core.transports import rpc_wire, sockets
from rl_core.transports.message_batches import batched, unbatched
from rl_core.transports.rpc import RpcClient, RpcServer, inline
from rl_core.transports.sockets import IoThread
from tests.integration.rpc_samples import RawPeer, identity


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

    def test_messages_of_several_frames_from_many_threads_stay_whole_and_in_the_order_of_their_thread(
        self, client, server
    ):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        arrived = defaultdict(list)

        def note(thread, number, arrays):
            arrived[thread].append(number)
            return arrays

        server.add_handlers({"note": inline(lambda call, *args: call.reply(note(*args)))})

        def work(thread):
            for number in range(100):
                arrays = client.call_sync("echo", [np.full(9, number)] * 6, timeout=60)
                assert [set(array.tolist()) for array in arrays] == [{number}] * 6
            calls = [client.call_future("note", thread, number, [number], timeout=60) for number in range(100)]
            assert [call.result(60) for call in calls] == [[number] for number in range(100)]

        try:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(8)))
        finally:
            sys.setswitchinterval(interval)
        assert arrived == {thread: list(range(100)) for thread in range(8)}
        assert client.counters["malformed"] == server.counters["malformed"] == 0

    def test_a_function_may_return_an_awaitable_which_is_awaited(self, client, service):
        assert client.call_sync("add_later", 1, 2) == 3

    async def test_call_sync_refuses_an_event_loop_thread(self, client):
        with pytest.raises(RuntimeError, match="event-loop thread"):
            client.call_sync("add", 1)

    def test_user_code_never_runs_on_the_socket_loop(self, client, service):
        client.call_sync("remember_thread")
        assert service.threads and not any(name == "rljob-io" for name in service.threads)

    def test_a_client_may_connect_before_its_server_is_there(self, service):
        address = f"tcp://127.0.0.1:{free_ports().hub}"
        client = RpcClient(address)
        future = client.call_future("add", 1, 2, timeout=60)
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

    def test_an_error_whose_text_cannot_be_made_or_sent_or_is_huge_still_arrives(self, client):
        with pytest.raises(RemoteError, match="raised Mute: .its text cannot be made: RuntimeError"):
            client.call_sync("raise_error", "mute", "")
        with pytest.raises(DataError, match=r"row \?"):
            client.call_sync("raise_error", "undecodable", "row ")
        with pytest.raises(RemoteError, match=r"raised ValueError: xxx.* \(73400320 characters\)"):
            client.call_sync("raise_error", "huge", "x")

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
    def test_a_deadline_tells_method_peer_seconds_and_that_it_was_received(self, client, server, monkeypatch):
        monkeypatch.setattr(rpc_wire, "RECEIPT_SECONDS", 1.0)  # a short call is one that is confirmed at once
        client.call_sync("add", 1)
        with pytest.raises(DeadlineExceeded) as caught:
            client.call_sync("block", timeout=1.5)
        for word in ("block", server.address, "1.5 s", "received it and is still working"):
            assert word in str(caught.value)

    def test_long_calls_are_confirmed_too(self, client, service):
        client.call_sync("add", 1)
        with pytest.raises(DeadlineExceeded, match="received it"):
            client.call_sync("block", timeout=10 * rpc_wire.RECEIPT_SECONDS)

    def test_or_that_the_server_never_answered(self):
        client = RpcClient("tcp://127.0.0.1:9")
        with pytest.raises(
            DeadlineExceeded, match=r"add at tcp://127.0.0.1:9 .*0\.05 s; it was not sent: the server never answered"
        ):
            client.call_sync("add", timeout=0.05)
        client.close()

    @pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
    def test_for_ever_is_no_deadline(self, client, timeout):
        with pytest.raises(ValueError, match="timeout must be None or a finite number of seconds"):
            client.call_future("add", 1, timeout=timeout)

    def test_a_deadline_in_a_hundred_years_is_one(self, server):
        client = RpcClient(server.address, share_memory=False)  # no other timer bounds the sleep of the I/O thread
        assert client.call_future("add", 1, 2, timeout=3e9).result(3e9) == 3
        client.close()

    async def test_the_handler_is_cancelled_at_the_deadline(self, client, service):
        await client.call("add", 1)
        with pytest.raises(DeadlineExceeded):
            await client.call("hang", timeout=1.0)
        assert service.started.is_set(), "the call must have come within its deadline"
        assert await asyncio.to_thread(service.cancelled.wait, 60)

    async def test_cancelling_the_caller_cancels_the_handler(self, client, service):
        call = asyncio.create_task(client.call("hang"))
        assert await asyncio.to_thread(service.started.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(service.cancelled.wait, 60)

    def test_cancelling_a_future_cancels_the_handler(self, client, service):
        future = client.call_future("hang")
        assert service.started.wait(60)
        assert future.cancel()
        assert service.cancelled.wait(60)

    async def test_a_cancelled_call_that_waits_for_room_never_starts(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=1).start()
        client = RpcClient(server.address)
        blocking = asyncio.create_task(client.call("block"))
        assert await asyncio.to_thread(service.started.wait, 60)
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

    async def test_a_cancelled_call_leaves_its_place_to_the_next(self, service):
        """One place for functions, held by `block`, and one for coroutines, held by `hang`: the others are cancelled before they begin."""
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=1).start()
        client = RpcClient(server.address)
        hanging = client.call_future("hang")
        assert await asyncio.to_thread(service.started.wait, 60)
        blocked = client.call_future("block")
        queued = [client.call_future(method, 1) for method in ("add", "add_async", "echo")]
        assert all(future.cancel() for future in queued)
        await self.settled(client)
        service.release.set()
        assert hanging.cancel()
        assert await asyncio.wrap_future(blocked) == 1
        assert await client.call("add_async", 1) == 1 and await client.call("add", 1) == 1
        client.close()
        server.close()

    async def test_a_call_cancelled_at_once_is_answered_and_leaves_its_place(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=1).start()
        client = RpcClient(server.address)
        await client.call("add", 1)
        for _ in range(200):  # so that some are cancelled between the start of their task and its first step
            client.call_future("hang").cancel()
        assert await client.call("add_async", 1) == 1
        client.close()
        server.close()

    async def settled(self, client):
        """Return when the server has taken up all that was sent before: unknown methods are answered without a handler."""
        with pytest.raises(ConfigError):
            await client.call("nothing")


class TestCredit:
    async def test_more_calls_than_credit_wait_and_all_finish(self, client):
        results = await asyncio.gather(*(client.call("add_async", number) for number in range(3 * rpc_wire.MAX_CALLS)))
        assert results == list(range(3 * rpc_wire.MAX_CALLS))

    def test_small_messages_share_frames_while_several_calls_are_in_flight(self, client, server, service, monkeypatch):
        sizes, send = {"call": [], "reply": []}, sockets.send

        def count(socket, parts):
            routed = socket.type == zmq.ROUTER
            head = zmq.Frame(bytes(parts[-1])) if len(parts) == 1 + routed else None
            sizes["reply" if routed else "call"].append(1 if head is None else len(unbatched([head])))
            send(socket, parts)

        server.add_handlers({"note": inline(lambda call, number: call.reply(number))})
        blocked = [client.call_future("block", timeout=60) for _ in range(3)]
        assert client.call_future("add", 1, 1, timeout=60).result(60) == 2, "the calls before it have been sent"
        held, io = threading.Event(), IoThread.shared()
        monkeypatch.setattr(sockets, "send", count)
        io.call_soon(held.wait, 20)
        calls = [client.call_future("note", number, timeout=60) for number in range(20)]
        held.set()
        assert [call.result(20) for call in calls] == list(range(20))
        assert sizes == {"call": [20], "reply": [20]}
        service.release.set()
        assert [call.result(20) for call in blocked] == [3] * 3

    async def test_calls_of_a_batch_that_are_cancelled_or_overdue_cost_the_others_nothing(self, client, service):
        first = [client.call_future("block", timeout=60) for _ in range(3)]
        service.started.wait(20)
        added = [client.call_future("add", number, 1, timeout=60) for number in range(40)]
        hanging = [client.call_future("hang", timeout=0.05) for _ in range(5)]
        assert all(call.cancel() for call in added[::4] if not call.done())
        for call in hanging:
            with pytest.raises(DeadlineExceeded):
                await asyncio.wrap_future(call)
        service.release.set()
        for number, call in enumerate(added):
            assert call.cancelled() or await asyncio.wrap_future(call) == number + 1
        assert sorted([await asyncio.wrap_future(call) for call in first]) == [3, 3, 3]
        assert client.idle

    def test_a_call_without_credit_tells_so_at_its_deadline(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, max_concurrency=200).start()
        client = RpcClient(server.address)
        client.call_sync("add", 1)
        blocked = [client.call_future("block", timeout=60) for _ in range(rpc_wire.MAX_CALLS)]
        with pytest.raises(DeadlineExceeded, match=f"not sent: {rpc_wire.MAX_CALLS} other calls are in flight"):
            client.call_sync("add", 1, timeout=1.0)
        service.release.set()
        assert len([future.result(60) for future in blocked]) == rpc_wire.MAX_CALLS
        client.close()
        server.close()


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
        assert service.started.wait(60)
        raw.send("call", [[0], {}], 6, method="echo")
        raw.receive("reply")
        welcome = raw.hello(pending=(5, 6, 7)).obj
        assert welcome.running == (5,) and welcome.finished == (6,)


class TestHostileMessages:
    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            ("hello", {"caller": None, "memory": None, "pending": ()}),
            ("hello", Hello(caller="me", memory=None, pending=())),
            ("hello", Hello(caller=None, memory=None, pending=({},))),
            ("hello", Hello(caller=None, memory=5, pending=5)),
            ("release", 5),
            ("release", [["one"]]),
            ("attach", None),
        ],
        ids=["no hello", "no caller", "no ids", "no list of ids", "no list", "no pair", "nothing"],
    )
    def test_a_frame_of_another_meaning_keeps_nobody_from_being_heard(self, service, kind, body):
        server = RpcServer("tcp://127.0.0.1:0", service, identity=identity("runner")).start()
        peer = RawPeer(server.address)
        peer.hello()
        for _ in range(3):  # at once: what comes after one is read too
            peer.send(kind, body)
        peer.send("call", [[1, 2], {}], 1, method="add")
        assert peer.receive("reply").obj == 3
        peer.context.destroy(0)
        server.close()

    def test_nothing_but_frames_is_read_and_the_server_goes_on(self, raw, server, client):
        raw.hello()
        for parts in ([b""], [b"garbage"], [b"\x01\x93"], [b"\x02abc"], [b"x"] * 50):
            raw.socket.send_multipart(parts)
        raw.send("call", "not arguments", 1, method="echo")
        assert raw.receive("error").obj.type == "FrameError"
        raw.send("hello", "nonsense")
        raw.send("release", [["rljob-x-1-2", 5]])
        raw.send("call", [[1, 2], {}], 2, method="add")
        assert raw.receive("reply").obj == 3  # so all of the above was read
        assert client.call_sync("add", 1, 2) == 3
        assert server.counters["malformed"] >= 6

    def test_garbage_in_a_batch_costs_none_of_the_messages_beside_it(self, raw, server):
        raw.hello()
        calls = [[raw.encode("call", [[number, 1], {}], number, method="add")[0]] for number in range(4)]
        nested = [b"\x02" + calls[0][0]]
        (batch,) = batched([calls[0], [b"garbage"], calls[1], nested, [b""], calls[2]])
        raw.socket.send_multipart([*batch])
        raw.socket.send_multipart([*batch, b"one frame too many"])
        raw.socket.send_multipart(calls[3])
        assert sorted(raw.receive("reply").obj for _ in range(4)) == [1, 2, 3, 4]
        assert server.counters["malformed"] >= 3 and server.counters["duplicates"] == 3

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
            client.call_sync("f", timeout=3)
        client.close()
        server.close()


class TestCallers:
    def test_a_handler_learns_its_caller(self, service):
        server = RpcServer("tcp://127.0.0.1:0", service, identity=identity("runner")).start()
        client = RpcClient(server.address, identity=identity("rollout", rank=3, attempt=2))
        assert client.call_sync("who") == Caller(
            job="j", uid="u1", epoch=0, role="rollout", group="rollout", rank=3, incarnation=(2, 0)
        )
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
