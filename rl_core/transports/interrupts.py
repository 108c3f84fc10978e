"""Interrupts (Ctrl-C) on the main thread, where Python raises KeyboardInterrupt between any two instructions.

A block that changes what other threads rely on, such as the state of a connection, must not end in its middle:

    with Interrupts.deferred() as interrupts:
        ...  # an interrupt that arrives in here is raised at the end of the block
        interrupts.allowed(poll.poll, 1000)  # may raise KeyboardInterrupt
"""

import threading
from _signal import getsignal, signal  # type: ignore[import-not-found] # those of `signal` look for the handler in an enum: 10 us
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any, TypeVar

Value = TypeVar("Value")
Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Does not defer anything. Used on other threads than the main one, which get no interrupts."""

    @staticmethod
    def deferred() -> "Interrupts":
        """Return a context manager that handles SIGINT at the end of its block. Does nothing except on the main thread."""
        if threading.get_ident() != threading.main_thread().ident:
            return _NONE
        handler = getsignal(SIGINT)
        return _Deferred(handler) if callable(handler) else _NONE

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def allowed(self, function: Callable[..., Value], *args: Any) -> Value:
        """Return `function(*args)`. An interrupt that was deferred, or that arrives meanwhile, is handled at once."""
        return function(*args)


_NONE = Interrupts()


class _Deferred(Interrupts):
    """Replaces the handler of SIGINT, by one that calls it later."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._number = 0
        """Number of the signal that was deferred; 0 if none was."""
        self._allowed = False

    def __enter__(self) -> "Interrupts":
        signal(SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal(SIGINT, self._handler)
        if self._number:
            self._handler(self._number, None)

    def allowed(self, function: Callable[..., Value], *args: Any) -> Value:
        self._allowed = True  # before the look for an interrupt: one that arrives later is handled at once
        try:
            if self._number:
                number, self._number = self._number, 0
                self._on_signal(number, None)
            return function(*args)
        finally:
            self._allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._allowed:
            self._number = number
            return
        self._allowed = False  # in case that the handler raises: what follows must not be interrupted
        self._handler(number, frame)
        self._allowed = True
