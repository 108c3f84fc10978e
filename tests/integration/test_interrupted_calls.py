"""Ctrl-C on the main thread, which reads the replies of others while it waits, and sends: wherever it arrives, all other calls end."""

import asyncio
import gc
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

import rl_core.transports
from rl_core.transports.interrupts import Interrupts
from rl_core.transports.rpc import RpcClient, RpcServer

FOLDER = str(Path(rl_core.transports.__file__).parent)
SECONDS = 60


class Interruption:
    """Sends SIGINT to this process just before the main thread runs instruction `at` of the package of the calls."""

    def __init__(self, at):
        self.left, self.sent, self.where = at, False, ""

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left < 0 and not self.sent:
                self.sent = True
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class Others:
    """A thread and a coroutine that use the same client as the main thread. Their replies arrive while that one reads."""

    def __init__(self):
        self.release = threading.Event()
        handlers = {"hold": self.hold, "echo": lambda value: value}
        self.server = RpcServer("tcp://127.0.0.1:0", handlers, max_concurrency=64).start()
        self.client = RpcClient(self.server.address)
        self.client.call_sync("echo", 0)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.pool = ThreadPoolExecutor(2)

    def hold(self):
        self.release.wait(SECONDS)
        return "held"

    def calls(self, ended):
        """Make the two calls as soon as the main thread reads, or has `ended`; then let the call of the main thread end."""
        reader = self.client._connection._reader
        while reader._thread is None and not ended.is_set():
            ended.wait(0.0001)
        coroutine = asyncio.run_coroutine_threadsafe(self.client.call("echo", 2, timeout=SECONDS), self.loop)
        values = self.client.call_sync("echo", 1, timeout=SECONDS), coroutine.result(SECONDS)
        self.release.set()
        return values

    def close(self):
        self.release.set()
        self.client.close()
        self.server.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.pool.shutdown()


@pytest.fixture
def others():
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what it deletes at an instruction of ours is not of this test
    others = Others()
    yield others
    others.close()
    gc.enable()
    signal.signal(signal.SIGINT, before)


def wait_for_reply(others):
    others.client.call_sync("hold", timeout=SECONDS)


def cancel_for_another(others):
    """Cancel a call for which another thread waits, and which that thread reads."""
    held = others.client.call_future("hold", timeout=SECONDS)
    waiting = others.pool.submit(held.exception, SECONDS)
    try:
        held.cancel()
    finally:
        if held.cancelled():
            with pytest.raises(CancelledError):
                waiting.result(SECONDS)


@pytest.mark.parametrize("operation", [wait_for_reply, cancel_for_another])
def test_an_interrupt_between_any_two_instructions_ends_no_call_of_others(others, operation):
    instruction = uninterrupted = 0
    places = set()
    while uninterrupted < 3:  # what the thread that reads does differs from time to time
        while not others.client.idle:  # a thread reads only while it waits for the only call
            time.sleep(0.0001)
        others.release.clear()
        ended = threading.Event()
        values = others.pool.submit(others.calls, ended)
        raised = False
        try:
            with Interruption(instruction) as interruption:
                operation(others)
        except KeyboardInterrupt:
            raised = True
        ended.set()
        assert values.result(SECONDS) == (1, 2), interruption.where
        assert raised == interruption.sent, interruption.where
        places.add(interruption.where)
        uninterrupted = 0 if raised else uninterrupted + 1
        instruction += 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert others.client.call_sync("echo", 3, timeout=SECONDS) == 3
    functions = {place.partition(",")[0].rpartition(".")[2] for place in places}
    assert {"submit", "_send_parts", "start_call"} <= functions
    if operation is wait_for_reply:
        assert {"read_until", "_watch", "_read_all", "_answered", "settle", "complete"} <= functions


class TestInterrupts:
    @pytest.fixture(autouse=True)
    def handler(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_an_interrupt_is_raised_at_the_end_of_the_block(self):
        done = []
        with pytest.raises(KeyboardInterrupt), Interrupts.deferred(), Interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        assert done == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.parametrize("early", [True, False])
    def test_it_is_raised_at_once_where_it_is_allowed(self, early):
        done = []
        with pytest.raises(KeyboardInterrupt), Interrupts.deferred() as interrupts:
            if early:
                signal.raise_signal(signal.SIGINT)
            interrupts.allowed(signal.raise_signal, 0 if early else signal.SIGINT)
            done.append(1)
        assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_a_handler_that_returns_is_called_once_for_each_interrupt_that_is_allowed(self):
        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        with Interrupts.deferred() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not seen
            for count in (2, 3):
                interrupts.allowed(signal.raise_signal, signal.SIGINT)
                assert len(seen) == count
        assert len(seen) == 3

    def test_an_ignored_signal_stays_ignored(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts.deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def test_other_threads_are_left_alone(self):
        with ThreadPoolExecutor(1) as pool:
            assert type(pool.submit(Interrupts.deferred).result(SECONDS)) is Interrupts
