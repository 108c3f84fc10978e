"""Holds the worker object of a process and runs its methods for RPC callers.

`construct(spec)` builds the object. `execute` runs a method for the runner and also returns how long it took. Every public method is also
served under its own name, for other workers (`weights_offer`, `step_rows`). Sync methods run in one thread, unless the group was launched
with `max_concurrency`. While it runs none, this thread receives the requests itself, and it sends the replies of its methods. Async methods
run on the loop of RPC handlers, at most 64 at a time.
"""

import asyncio
import functools
import importlib
import inspect
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from rl_core.api.errors import ConfigError, InfrastructureError, RemoteError, RLJobError, text_of
from rl_core.api.imports import collection_paused
from rl_core.api.user_code import own_frames
from rl_core.messages.calls import MethodResult, WorkerSpec
from rl_core.messages.members import MemberState
from rl_core.transports import frames
from rl_core.transports.handlers import HandlerRunner, Requests
from rl_core.transports.rpc import IncomingCall, scheduling
from rl_core.workers import arguments
from rl_core.workers.context import WorkerContext
from rl_core.workers.group import check_class
from rl_core.workers.timers import PROCESS
from rl_core.workers.worker import Worker

logger = logging.getLogger(__name__)
ASYNC_CONCURRENCY = 64


class MethodServer:
    """Serves the methods of one worker object, which `construct` builds."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        before_build: Callable[[], None],
        on_methods: Callable[[dict[str, Callable[..., Any]]], None],
        on_ready: Callable[[], Awaitable[None]],
        requests: Requests | None = None,
    ) -> None:
        """Serve in the process of `context`.

        - `before_build()` is called in the thread that builds the object, before it is built.
        - `on_methods(handlers)` receives the handlers that are to be served under their own names.
        - `on_ready()` is awaited once the object is built, before `construct` returns.
        - `requests` is the RPC server of the process. The worker's thread reads its requests while no method runs. None: it does not.
        """
        self.worker: Worker | None = None
        self._context = context
        self._before_build = before_build
        self._on_methods = on_methods
        self._on_ready = on_ready
        self._served: set[str] = set()
        self._built_from: bytes | None = None
        self._runner = HandlerRunner(threads=1, coroutines=ASYNC_CONCURRENCY, requests=requests)
        self._building = asyncio.Lock()
        """Held during a construction, so that a second `construct` finds the object of the first and keeps or closes it."""

    async def construct(self, spec: WorkerSpec) -> MethodResult:
        """Build the worker object that `spec` describes.

        If the present object was built from an equal spec, it is kept, and its `on_new_epoch` hook is called. Otherwise the present object
        is closed first. Raises ConfigError when the class cannot be imported, RemoteError when its `__init__` fails.
        """
        async with self._building:
            await self._construct(spec)
            await self._on_ready()
        return MethodResult(value=None, durations={})

    @scheduling
    def execute(self, call: IncomingCall) -> None:
        """Run the public method named by the option `target` of the call. The reply has its value, its duration and the sums of timers.

        The caller gets InfrastructureError before an object is constructed, ConfigError for an unknown method, and RemoteError, with the
        traceback, when the method raises an exception that is no RLJobError.
        """
        method = call.header.options.get("target")
        if type(method) is not str:
            raise ConfigError(f"execute needs the name of a method as its target, got {method!r}")
        self._start(call, method, timed=True)

    async def new_epoch(self, epoch: int) -> None:
        """Call the `on_new_epoch` hook, in which the object drops the work of older epochs."""
        await self._hook("on_new_epoch", epoch)

    async def drain(self) -> None:
        """Call the `drain` hook, then wait until no method is running. The wait has no timeout; the caller sets one."""
        await self._hook("drain")
        await self._runner.wait_idle()

    async def close(self) -> None:
        """Call the `close` hook of the object, if there is one, and leave the process groups in which it has sent tensors."""
        await self._hook("close")
        if self.worker is not None:
            await asyncio.to_thread(self.worker.leave_process_groups)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _construct(self, spec: WorkerSpec) -> None:
        key = b"".join(map(bytes, frames.encode([spec.path, spec.args, spec.kwargs])))
        if self.worker is not None and key == self._built_from:
            await self.new_epoch(self._context.epoch)
            if not self._context.state.constructed:
                self._context.set_state(MemberState.READY)
            return
        self._context.set_state(MemberState.CONSTRUCTING)
        await self.close()
        self.worker = None
        if spec.max_concurrency is not None:
            self._runner.limit(spec.max_concurrency)
        try:
            self.worker = await self._in_thread(lambda: self._build(spec), "__init__")
        except BaseException:
            self._context.set_state(MemberState.JOINING)
            raise
        self._built_from = key
        self._serve_methods()
        if self._context.state is MemberState.CONSTRUCTING:
            self._context.set_state(MemberState.READY)

    def _build(self, spec: WorkerSpec) -> Worker:
        self._before_build()
        cls = load_class(spec.path)
        args, kwargs = arguments.unpack(spec.args, spec.kwargs)
        try:
            return cls.create_in_context(self._context, *args, **kwargs)
        except RLJobError:
            raise
        except (Exception, SystemExit) as error:
            raise self._remote("__init__", error) from error

    def _serve_methods(self) -> None:
        assert self.worker is not None
        names = self.worker.remote_methods() - self._served - {"construct", "execute"}
        self._served |= names
        self._on_methods({name: self._handler(name) for name in names})

    def _handler(self, name: str) -> Callable[..., Any]:
        return scheduling(functools.partial(self._start, method=name, timed=False))

    def _start(self, call: IncomingCall, method: str, *, timed: bool) -> None:
        """Run `method` for `call`: an async one on the loop of handlers, any other one in the worker's thread."""
        worker = self.worker
        if worker is None:
            raise InfrastructureError(
                f"{self._context.identity.name} holds no worker yet ({self._context.state}); construct it first"
            )
        # The code of a property must not run on the I/O thread.
        is_property = isinstance(getattr(type(worker), method, None), property)
        if method.startswith("_") or is_property or not callable(function := getattr(worker, method, None)):
            raise ConfigError(
                f"{type(worker).__qualname__} has no public method {method!r}; it has {', '.join(sorted(worker.remote_methods()))}"
            )
        self._runner.submit(call, self._guarded(function, method, timed))

    def _guarded(self, function: Callable[..., Any], name: str, timed: bool) -> Callable[..., Any]:
        """Wrap a method: exceptions other than RLJobError become RemoteError, and with `timed` the result becomes a MethodResult."""

        async def awaited(start: Callable[[], Awaitable[Any]], started_at: float) -> Any:
            try:
                value = await start()
            except RLJobError:
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise self._remote(name, error) from error
            return _timed(name, value, started_at) if timed else value

        if inspect.iscoroutinefunction(function):

            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                return await awaited(lambda: function(*args, **kwargs), time.perf_counter())

            return coroutine

        def run(*args: Any, **kwargs: Any) -> Any:
            started_at = time.perf_counter()
            try:
                value = function(*args, **kwargs)
            except RLJobError:
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise self._remote(name, error) from error
            if inspect.isawaitable(value):
                return awaited(lambda: value, started_at)
            return _timed(name, value, started_at) if timed else value

        return run

    async def _call(self, function: Callable[..., Any], name: str) -> Any:
        """Run an async function on this loop, any other one in the worker's thread. An awaitable that it returns is awaited on this loop."""
        if inspect.iscoroutinefunction(function):
            return await function()
        value = await self._in_thread(function, name)
        return await value if inspect.isawaitable(value) else value

    async def _in_thread(self, work: Callable[[], Any], method: str) -> Any:
        def guarded() -> Any:
            try:
                return work()
            except (StopIteration, SystemExit) as error:
                # A future refuses the first, and the second would end the loop that awaits it.
                raise self._remote(method, error) from error

        return await asyncio.wrap_future(self._runner.threads.run(guarded))

    async def _hook(self, name: str, *args: Any) -> None:
        hook = getattr(self.worker, name, None)
        if hook is None:
            return
        try:
            await self._call(functools.partial(hook, *args), name)
        except Exception:  # a failing hook of user code must not stop registration or the end of the process
            logger.exception("%s of %s failed", name, type(self.worker).__qualname__)

    def _remote(self, method: str, error: BaseException) -> RemoteError:
        identity = self._context.identity
        trace = own_frames(error) or "".join(traceback.format_exception(error))
        return RemoteError(
            f"{identity.group} rank {identity.rank}: {method} raised {type(error).__name__}: {text_of(error)}\n{trace.rstrip()}"
        )


def _timed(method: str, value: Any, start: float) -> MethodResult:
    return MethodResult(value=value, durations={method: time.perf_counter() - start, **PROCESS.pop()})


def load_class(path: str) -> type[Worker]:
    """Import and return the worker class named `module:Class`.

    Raises ConfigError when it cannot be imported or is no worker class, ValueError when one of its methods has the name of a method of
    WorkerGroup.
    """
    module, _, name = path.partition(":")
    try:
        with collection_paused():
            cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"worker class {path} must be importable, got {type(error).__name__}: {error}") from error
    if not isinstance(cls, type) or not issubclass(cls, Worker):
        raise ConfigError(f"{path} must be a class that derives from rl_core.workers.worker.Worker, got {cls!r}")
    check_class(cls)
    return cls
