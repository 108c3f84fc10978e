"""Runs the handlers of an RPC server: functions in a thread pool, coroutine functions on an event loop that the process shares.

Handlers never run on the I/O thread. `HandlerRunner` runs at most `max_concurrency` of them at a time and queues the others in order.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rl_core.transports.rpc_incoming import IncomingCall
from rl_core.transports.rpc_wire import CALLER, CALLER_HOST


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


class HandlerRunner:
    """Runs the handlers of calls, at most `max_concurrency` at a time, in the order the calls came."""

    def __init__(self, *, max_concurrency: int) -> None:
        self._limit = max_concurrency
        self._threads = concurrent.futures.ThreadPoolExecutor(max_concurrency, thread_name_prefix="rljob-rpc")
        self._active = 0
        self._queue: deque[_Running] = deque()
        self._lock = threading.Lock()
        """Guards `_active` and `_queue`: handlers end on their own threads while the I/O thread submits."""

    def submit(self, call: IncomingCall, handler: Callable[..., Any]) -> None:
        """Run `handler` for `call` as soon as there is room."""
        running = _Running(call, handler)
        call.begun = True
        if running.on_loop:
            call.on_cancel = running.cancel
        with self._lock:
            if self._active >= self._limit:
                self._queue.append(running)
                return
            self._active += 1
        self._start(running)

    def close(self) -> None:
        """Accept no more calls. Handlers that run are not interrupted."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, running: "_Running") -> None:
        if running.on_loop:
            HandlerLoop.shared().loop.call_soon_threadsafe(running.start, self._finished)
            return
        try:
            self._threads.submit(contextvars.Context().run, running.run, self._finished)
        except RuntimeError:  # the server was closed while this call waited
            self._finished()

    def _finished(self) -> None:
        with self._lock:
            if not self._queue:
                self._active -= 1
                return
            running = self._queue.popleft()
        self._start(running)


class _Running:
    """A call with its handler."""

    def __init__(self, call: IncomingCall, handler: Callable[..., Any]) -> None:
        self.call = call
        self.handler = handler
        self.on_loop = inspect.iscoroutinefunction(handler)
        self._task: asyncio.Task[None] | None = None

    def run(self, finished: Callable[[], None]) -> None:
        """Run a plain function in this thread and answer. Once begun it cannot be cancelled; its answer is dropped then."""
        try:
            args, kwargs = self._begin()
            self.call.reply(self.handler(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller, SystemExit too
            self.call.fail(error)
        finally:
            finished()

    def start(self, finished: Callable[[], None]) -> None:
        """Start a coroutine function. On the handler loop."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._await(finished), context=contextvars.Context())

    async def _await(self, finished: Callable[[], None]) -> None:
        try:
            args, kwargs = self._begin()
            self.call.reply(await self.handler(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as above; on the loop SystemExit would end the loop
            self.call.fail(error)
        finally:
            finished()

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
