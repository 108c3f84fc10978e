"""Where handlers of an RPC server run: sync ones in a thread pool, async ones on the process's handler loop.

Never on the socket loop. `HandlerRunner` is used by `rpc_server` only; it keeps at most `max_concurrency` handlers
running and the rest in order. A handler may return a value, an awaitable, or a generator (a stream).
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar, Protocol

from rl_core.api.errors import ConfigError
from rl_core.messages.rpc import Caller
from rl_core.transports.rpc_wire import STREAM_WINDOW, _caller

logger = logging.getLogger(__name__)


class Job(Protocol):
    """One request as the runner sees it, implemented by `rpc_server.IncomingCall`. Any thread may call it."""

    caller: Caller | None
    cancelled: bool
    method: str
    streams: bool
    """Whether the caller reads a stream."""

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Decode the arguments."""

    def reply(self, value: Any) -> bool:
        """Answer with a value."""

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""

    def item(self, value: Any) -> None:
        """Send one item of a stream."""

    def end(self) -> None:
        """End a stream."""


class HandlerLoop:
    """The event loop for async handlers, one per process, on a thread of its own."""

    _shared: ClassVar["HandlerLoop | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

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


class Window:
    """Credit of one stream: `take` waits for the consumer, `grant` and `stop` come from the I/O thread."""

    def __init__(self) -> None:
        self._credit = STREAM_WINDOW
        self._stopped = False
        self._condition = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def grant(self, items: int) -> None:
        """Let `items` more be sent."""
        with self._condition:
            self._credit += items
            self._notify()

    def stop(self) -> None:
        """Wake whoever waits; nobody reads any more."""
        with self._condition:
            self._stopped = True
            self._notify()

    def take(self) -> bool:
        """Wait in a thread for credit; False when the stream was stopped."""
        with self._condition:
            self._condition.wait_for(lambda: self._credit > 0 or self._stopped)
            self._credit -= 1
            return not self._stopped

    async def take_async(self) -> bool:
        """Wait on the handler loop for credit; False when the stream was stopped."""
        while True:
            with self._condition:
                if self._stopped:
                    return False
                if self._credit > 0:
                    self._credit -= 1
                    return True
                event = asyncio.Event()
                self._waiter = (asyncio.get_running_loop(), event)
            await event.wait()

    def _notify(self) -> None:
        self._condition.notify_all()
        if self._waiter is not None:
            loop, event = self._waiter
            self._waiter = None
            loop.call_soon_threadsafe(event.set)


class Running:
    """A handler under way: `cancel` stops what can be stopped (queued jobs, coroutines, streams)."""

    def __init__(self, job: Job, handler: Callable[..., Any]) -> None:
        self.job = job
        self.handler = handler
        self.window = Window()
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Cancel the handler; a plain function that already runs in a thread is left to end, unheard."""
        self.job.cancelled = True
        self.window.stop()
        HandlerLoop.shared().loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()


class HandlerRunner:
    """Runs jobs, at most `max_concurrency` at a time, in the order they came."""

    def __init__(self, *, max_concurrency: int, executor: concurrent.futures.Executor | None = None) -> None:
        self._limit = max_concurrency
        self._owns_executor = executor is None
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(
            max_concurrency, thread_name_prefix="rljob-rpc"
        )
        self._active = 0
        self._queue: deque[Running] = deque()
        self._lock = threading.Lock()

    def submit(self, job: Job, handler: Callable[..., Any]) -> Running:
        """Run `handler` for `job` as soon as there is room."""
        running = Running(job, handler)
        with self._lock:
            if self._active >= self._limit:
                self._queue.append(running)
                return running
            self._active += 1
        self._start(running)
        return running

    def close(self) -> None:
        """Take no more work; running threads end on their own."""
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, running: Running) -> None:
        handler = running.handler
        if inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler):
            HandlerLoop.shared().loop.call_soon_threadsafe(self._start_task, running)
        else:
            try:
                self._executor.submit(contextvars.Context().run, self._in_thread, running)
            except RuntimeError:  # the executor was shut down while this job waited
                self._finished()

    def _finished(self) -> None:
        with self._lock:
            if not self._queue:
                self._active -= 1
                return
            running = self._queue.popleft()
        self._start(running)

    def _in_thread(self, running: Running) -> None:
        job = running.job
        if job.cancelled:
            job.fail(asyncio.CancelledError())
            self._finished()
            return
        _caller.set(job.caller)
        try:
            args, kwargs = job.arguments()
            value = running.handler(*args, **kwargs)
            if inspect.isawaitable(value) or inspect.isasyncgen(value):
                HandlerLoop.shared().loop.call_soon_threadsafe(self._start_task, running, value)
                return
            if inspect.isgenerator(value):
                self._stream_in_thread(running, value)
            else:
                job.reply(value)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller
            job.fail(error)
        self._finished()

    def _stream_in_thread(self, running: Running, items: Iterator[Any]) -> None:
        _check_reader(running.job)
        for item in items:
            if not running.window.take():
                break
            running.job.item(item)
        running.job.end()

    def _start_task(self, running: Running, value: Any = None) -> None:
        if running.job.cancelled and value is None:
            running.job.fail(asyncio.CancelledError())
            self._finished()
            return
        loop = asyncio.get_running_loop()
        running.task = loop.create_task(self._on_loop(running, value), context=contextvars.Context())
        if running.job.cancelled:  # after its first step: a task cancelled before it would not even run its end
            loop.call_soon(running.task.cancel)

    async def _on_loop(self, running: Running, value: Any) -> None:
        job = running.job
        _caller.set(job.caller)
        try:
            if value is None:
                args, kwargs = job.arguments()
                value = running.handler(*args, **kwargs)
            if inspect.isasyncgen(value):
                await self._stream_on_loop(running, value)
            else:
                job.reply(await value)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller, SystemExit too
            job.fail(error)
        finally:
            self._finished()

    async def _stream_on_loop(self, running: Running, items: AsyncIterator[Any]) -> None:
        _check_reader(running.job)
        async for item in items:
            if not await running.window.take_async():
                break
            running.job.item(item)
        running.job.end()


def _check_reader(job: Job) -> None:
    """Raise ConfigError when nobody would read the stream: it would wait for credit for ever."""
    if not job.streams:
        raise ConfigError(f"{job.method} gives a stream of items; use stream() in place of call()")
