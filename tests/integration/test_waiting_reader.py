"""Threads that read a socket themselves while they wait: calls end for them however they end, and a busy thread holds nobody up."""

import asyncio
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from rl_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerLost
from rl_core.transports.handlers import HandlerRunner
from rl_core.transports.rpc import RpcClient, RpcServer, scheduling
from rl_core.transports.sockets import split_address
from tests.integration.test_channel_given_up import Cable


class Worker:
    """A server whose one thread runs the functions and, as that of a worker process does, receives their requests while it has none."""

    def __init__(self):
        self.server = RpcServer("tcp://127.0.0.1:0", {})
        self.runner = HandlerRunner(threads=1, coroutines=8, requests=self.server)
        self.release, self.started, self.ran = threading.Event(), threading.Event(), defaultdict(list)
        for function in (self.note, self.block, self.echo):
            self.server.add_handlers({function.__name__: self.handler(function)})
        self.server.start()

    def handler(self, function):
        return scheduling(lambda call: self.runner.submit(call, function))

    def note(self, caller, number):
        self.ran[caller].append(number)
        return threading.get_ident()

    def block(self):
        self.started.set()
        self.release.wait(60)
        return threading.get_ident()

    async def echo(self, value):
        await asyncio.sleep(0)
        return value

    def reading(self):
        return self.server._reader._thread

    def close(self):
        self.release.set()
        self.server.close()
        self.runner.close()


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestCaller:
    @pytest.mark.parametrize(
        ("end", "error"),
        [
            (lambda client, call: call.cancel(), CancelledError),
            (lambda client, call: client.fail("declared lost"), WorkerLost),
            (lambda client, call: client.close(), InfrastructureError),
            (lambda client, call: None, DeadlineExceeded),
        ],
        ids=["cancelled", "lost", "closed", "late"],
    )
    def test_a_call_that_ends_on_another_thread_ends_for_the_thread_that_reads(self, client, service, end, error):
        call = client.call_future("block", timeout=2.0 if error is DeadlineExceeded else 60)
        assert service.started.wait(60)
        reader = client._connection._reader

        def later():
            wait_for(lambda: reader._thread is not None)
            end(client, call)

        thread = threading.Thread(target=later)
        thread.start()
        with pytest.raises(error):
            call.result(60)
        thread.join(60)
        assert reader._thread is None

    def test_a_wait_that_is_over_leaves_the_call_to_the_next_one(self, client, service):
        call = client.call_future("block", timeout=60)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                call.result(0.01)
        service.release.set()
        assert call.result(60) == 1 and call.result(0) == 1

    def test_the_calls_of_other_threads_go_on_while_one_waits_and_when_it_has_ended(self, client, service):
        first = client.call_future("block", timeout=60)
        assert service.started.wait(60)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(first.result)
            wait_for(lambda: client._connection._reader._thread is not None)
            assert [client.call_sync("add", number, 1, timeout=60) for number in range(100)] == list(range(1, 101))
            service.release.set()
            assert waiting.result(60) == 1
        assert client.call_sync("add_async", 1, timeout=60) == 1

    def test_the_replies_of_one_client_complete_one_after_the_other(self, client):
        """Whether the thread that waits or the I/O thread reads them: what one client converts never runs at the same time."""
        running, most = set(), []

        def convert(value):
            running.add(threading.get_ident())
            most.append(len(running))
            time.sleep(0)
            running.discard(threading.get_ident())
            return value

        def work(seed):
            generator = random.Random(seed)
            calls = [client.start_call("add_async", (number,), {}, convert=convert) for number in range(200)]
            generator.shuffle(calls)
            return sum(call.result(60) for call in calls)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [sum(range(200))] * 4
        assert set(most) == {1}


class TestWorker:
    def test_the_thread_that_runs_the_functions_reads_while_it_has_none(self, worker):
        client = RpcClient(worker.server.address)
        thread = client.call_sync("note", "only", 0, timeout=60)
        wait_for(lambda: worker.reading() == thread)
        assert client.call_sync("note", "only", 1, timeout=60) == thread
        worker.server.close()
        wait_for(lambda: worker.reading() is None)
        client.close()

    def test_a_function_that_blocks_holds_up_no_other_request(self, worker):
        client = RpcClient(worker.server.address)
        wait_for(lambda: client.call_sync("note", "first", 0, timeout=60) == worker.reading())
        blocked = client.call_future("block", timeout=60)
        assert worker.started.wait(60)
        other = RpcClient(worker.server.address)
        assert [other.call_sync("echo", number, timeout=60) for number in range(100)] == list(range(100))
        worker.release.set()
        assert blocked.result(60) == client.call_sync("note", "last", 0, timeout=60)
        client.close()
        other.close()

    def test_requests_of_all_callers_run_once_and_in_their_order(self, worker):
        def call(caller):
            client, generator = RpcClient(worker.server.address), random.Random(caller)
            calls = []
            for number in range(300):
                calls.append(client.call_future("note", caller, number, timeout=60))
                if generator.random() < 0.2:
                    assert client.call_sync("echo", number, timeout=60) == number
                if generator.random() < 0.1:
                    calls[-1].result(60)
            threads = {call.result(60) for call in calls}
            client.close()
            return threads

        with ThreadPoolExecutor(4) as pool:
            threads = set.union(*pool.map(call, range(4)))
        assert len(threads) == 1 and worker.ran == {caller: list(range(300)) for caller in range(4)}
        assert worker.server.counters["malformed"] == worker.server.counters["duplicates"] == 0

    def test_a_connection_that_is_cut_again_and_again_loses_and_doubles_no_call(self, worker):
        """Both ends read on the threads that wait. A call that may have run without an answer fails as lost, and did not run twice."""
        cable = Cable(split_address(worker.server.address)[1])
        client, answered, lost = RpcClient(cable.address), [], []
        stop = threading.Event()

        def cut():
            while not stop.wait(0.05):
                cable.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        for number in range(400):
            try:
                client.call_sync("note", "only", number, timeout=60)
                answered.append(number)
            except WorkerLost:
                lost.append(number)
        stop.set()
        cutting.join(60)
        client.close()
        cable.close()
        ran = worker.ran["only"]
        assert len(ran) == len(set(ran)) and set(answered) <= set(ran) <= set(answered) | set(lost)
