"""A limit on the CPU time of scoring one answer, for verifiers that some texts keep busy for ever.

The limit counts CPU time instead of wall-clock time, so that whether an answer is unreadable does not depend on the load of the machine. It
uses signals and so works in the main thread only, where env children run user code; in other threads only the deadline of the step applies.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CpuLimitReached(BaseException):
    """Raised when the CPU time of a verification is used up. Not an Exception, so that library code does not catch it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitReached in the block after `seconds` of CPU time; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: Any) -> None:
        raise CpuLimitReached

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
