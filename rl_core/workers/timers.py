"""Timers of a worker: seconds by tag. The runner receives them with the results of a group call."""

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Timers:
    """Sums of seconds by tag. All methods may be called from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start with no sums. `clock` returns seconds."""
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        """Guards `_seconds`: methods run in several threads and on an event loop."""

    def add(self, tag: str, seconds: float) -> None:
        """Add `seconds` to the sum of `tag`."""
        with self._lock:
            self._seconds[tag] = self._seconds.get(tag, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """Return the sums of seconds by tag, and reset them."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds


PROCESS = Timers()
"""The timers of this process; a process holds one worker."""


class worker_timer:  # noqa: N801 - used as a function
    """Sum the seconds of a `with` block or, as a decorator, of each call under `tag` (None: the name of the function).

    with worker_timer("pack"): ...
    @worker_timer()
    def run_training(self): ...      # async functions as well
    """

    def __init__(self, tag: str | None = None, *, timers: Timers = PROCESS) -> None:
        """Measure under `tag`.

        `tag` None uses the name of the decorated function, or of the function that contains the `with` block. `timers` receives the
        seconds.
        """
        self._tag = tag
        self._timers = timers
        self._starts: list[float] = []

    def __enter__(self) -> "worker_timer":
        if self._tag is None:
            self._tag = sys._getframe(1).f_code.co_name
        self._starts.append(self._timers.clock())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timers.add(self._tag or "", self._timers.clock() - self._starts.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, timed."""
        tag, timers = self._tag or function.__name__, self._timers
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with worker_timer(tag, timers=timers):
                    return await function(*args, **kwargs)

            return timed_async  # type: ignore[return-value]

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with worker_timer(tag, timers=timers):
                return function(*args, **kwargs)

        return timed
