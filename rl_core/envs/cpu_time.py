"""A bound on the CPU time of one answer, for verifiers that a model's text can keep busy for ever.

It counts CPU time of this process and not seconds on the clock: whether an answer counts as unreadable is a property of the
answer, never of a loaded machine. Limits need signals, hence the main thread (env children run there); in another thread
the step's own deadline is the only bound.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CpuLimitReached(BaseException):
    """The CPU time of one verification is used up; not an Exception, so that library code does not swallow it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitReached inside the block after `seconds` of CPU time; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: Any) -> None:
        raise CpuLimitReached

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
