"""Runs the handlers of an RPC server: functions on threads, coroutine functions on an event loop that the process shares.

Handlers never run on the I/O thread. A function takes one change of threads: from the I/O thread to the thread that runs it and replies; or
none where the thread that runs it reads the requests while it has no work.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol

from rl_core.transports.rpc_incoming import IncomingCall
from rl_core.transports.rpc_wire import CALLER, CALLER_HOST

logger = logging.getLogger(__name__)


class HandlerLoop:
    """The event loop for async handlers, one per process, on a thread of its own."""

    _shared: ClassVar["HandlerLoop | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Guards `_shared`: two threads at first use must not make two loops."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rljob-handlers", daemon=True).start()

    @classmethod
    def shared(cls) -> "HandlerLoop":
        """Return the handler loop of this process, started at first use."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            return cls._shared


class Requests(Protocol):
    """Where a thread without work may receive requests. Implemented by `RpcServer`."""

    def read_until(self, done: Callable[[], bool]) -> bool:
        """Receive requests on this thread until `done()`; return False at once when that is not possible."""

    def wake_reader(self) -> None:
        """Let the thread in `read_until` look at `done()` again."""


class HandlerThreads:
    """At most `most` daemon threads, started when they are needed, that start functions in the order of `submit`.

    With `requests` a thread without work receives the requests itself, which submit the work: those that come one by one then need no change
    of threads.
    """

    def __init__(self, most: int, name: str, requests: Requests | None = None) -> None:
        self._max_threads, self._name, self._requests = most, name, requests
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards the two below: functions are submitted and end on several threads."""
        self._unfinished = 0
        self._threads = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work()` as soon as a thread is free."""
        with self._lock:
            self._unfinished += 1
            starts_thread = self._threads < min(self._unfinished, self._max_threads)
            self._threads += starts_thread
        self._put(work)
        if starts_thread:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def run(self, work: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Run `work()` as `submit` does and return the future of its result."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the future carries it
                future.set_exception(error)

        self.submit(run)
        return future

    def close(self) -> None:
        """End the threads once everything that was submitted has run. What is submitted afterwards never runs."""
        with self._lock:
            self._max_threads = 0
            threads = self._threads
        for _ in range(threads):
            self._put(None)

    def _put(self, work: Callable[[], None] | None) -> None:
        self._queue.put(work)
        if self._requests is not None:
            self._requests.wake_reader()

    def _run(self) -> None:
        burst = 0  # functions that this thread has run without waiting
        while True:
            if self._queue.empty():
                # after a burst the I/O thread receives the next requests: it reads several at a time while this thread runs the first one
                if self._requests is not None and burst < 2:
                    self._requests.read_until(lambda: not self._queue.empty())
                burst = 0
            work = self._queue.get()
            if work is None:
                return
            burst += 1
            try:
                work()
            except Exception:
                logger.exception("the reply of a handler could not be sent")
            del work  # an idle thread keeps no arguments alive
            with self._lock:
                self._unfinished -= 1


class HandlerRunner:
    """Runs the handlers of calls in the order the calls came: at most `threads` functions and `coroutines` coroutines at a time."""

    def __init__(self, *, threads: int, coroutines: int, requests: Requests | None = None) -> None:
        """`requests` is where threads without work receive requests; None leaves that to the I/O thread."""
        self._requests = requests
        self.threads = HandlerThreads(threads, "rljob-rpc", requests)
        self._most_coroutines = coroutines
        self._coroutines = 0
        """Coroutines that are running."""
        self._queue: deque[_Running] = deque()
        """Coroutines that wait for others to end."""
        self._unfinished = 0
        self._on_idle: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        """Guards all of the above: handlers end on their own threads while the I/O thread submits."""

    def submit(self, call: IncomingCall, handler: Callable[..., Any]) -> None:
        """Run `handler` for `call` as soon as there is room. An awaitable that a function returns is awaited on the loop of handlers."""
        running = _Running(call, handler, self._finished)
        if not inspect.iscoroutinefunction(handler):
            with self._lock:  # `limit` closes the threads under it
                self._unfinished += 1
                self.threads.submit(running.run)
            return
        call.on_cancel = running.cancel
        with self._lock:
            self._unfinished += 1
            self._queue.append(running)
            startable = self._take_startable()
        self._start(startable)

    def limit(self, most: int) -> None:
        """Let at most `most` functions, and at most `most` coroutine functions, run at a time. `most` must be positive.

        Functions that were submitted before keep their old limit, so that more than `most` may run for a while. Coroutines that already run
        go on. Awaitables that plain functions return are not limited.
        """
        with self._lock:
            self.threads.close()
            self.threads = HandlerThreads(most, "rljob-rpc", self._requests)
            self._most_coroutines = most
            startable = self._take_startable()
        self._start(startable)

    async def wait_idle(self) -> None:
        """Wait until no handler runs or waits to run."""
        loop = asyncio.get_running_loop()
        idle = asyncio.Event()
        with self._lock:
            if not self._unfinished:
                return
            self._on_idle.append(lambda: loop.call_soon_threadsafe(idle.set))
        await idle.wait()

    def close(self) -> None:
        """End the threads once the functions submitted so far have run. Nothing may be submitted afterwards: a function would never run."""
        self.threads.close()

    def _take_startable(self) -> "list[_Running]":
        """Take the coroutines for which there is room from the queue, and count them as running. With the lock."""
        room = max(self._most_coroutines - self._coroutines, 0)
        startable = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
        self._coroutines += len(startable)
        return startable

    def _start(self, startable: "list[_Running]") -> None:
        for running in startable:
            HandlerLoop.shared().loop.call_soon_threadsafe(running.start)

    def _finished(self, is_coroutine: bool) -> None:
        with self._lock:
            self._unfinished -= 1
            on_idle: list[Callable[[], object]] = []
            if not self._unfinished:
                on_idle, self._on_idle = self._on_idle, on_idle
            self._coroutines -= is_coroutine
            startable = self._take_startable()
        for wake in on_idle:
            wake()
        self._start(startable)


class _Running:
    """A call with its handler. `finished(is_coroutine)` is called once when it has ended."""

    __slots__ = ("_finished", "_task", "call", "handler")

    def __init__(self, call: IncomingCall, handler: Callable[..., Any], finished: Callable[[bool], None]) -> None:
        self.call = call
        self.handler = handler
        self._finished = finished
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Run a plain function in this thread and reply. Once begun it cannot be cancelled; its reply is dropped then."""
        contextvars.Context().run(self._run)

    def _run(self) -> None:
        finished = True
        try:
            args, kwargs = self._begin()
            value = self.handler(*args, **kwargs)
            if inspect.isawaitable(value):
                asyncio.run_coroutine_threadsafe(
                    self._reply_later(value, is_coroutine=False), HandlerLoop.shared().loop
                )
                finished = False
            else:
                self.call.reply(value)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller, SystemExit too
            self.call.fail(error)
        finally:
            if finished:
                self._finished(False)

    def start(self) -> None:
        """Start a coroutine function. On the handler loop."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._reply_later(None, is_coroutine=True), context=contextvars.Context())

    async def _reply_later(self, value: Awaitable[Any] | None, *, is_coroutine: bool) -> None:
        try:
            if value is None:
                args, kwargs = self._begin()
                value = self.handler(*args, **kwargs)
            self.call.reply(await value)
        except BaseException as error:  # noqa: BLE001 - as above; on the loop SystemExit would end the loop
            self.call.fail(error)
        finally:
            self._finished(is_coroutine)

    def _begin(self) -> tuple[list[Any], dict[str, Any]]:
        if self.call.cancelled:
            raise asyncio.CancelledError
        CALLER.set(self.call.caller)
        CALLER_HOST.set(self.call.host)
        return self.call.arguments()

    def cancel(self) -> None:
        """Cancel the coroutine. On the I/O thread."""
        HandlerLoop.shared().loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            # one turn later: a task that is cancelled before its first step never runs, and would not answer
            asyncio.get_running_loop().call_soon(self._task.cancel)
