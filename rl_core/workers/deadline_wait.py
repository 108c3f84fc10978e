"""A wait with a deadline that logs what is missing after 10 % and after 50 % of its time."""

import logging
import threading
import time
from collections.abc import Callable

from rl_core.transports.rpc_wire import finite_seconds

logger = logging.getLogger(__name__)
_WARN_AT = (0.1, 0.5)
_QUIET_SECONDS = 5.0
"""Seconds before which nothing is logged about a wait."""


class DeadlineWait:
    """One wait of at most `seconds` for `what`.

    The caller loops: it checks its condition, asks `pause` how long it may sleep at most, sleeps, and checks again.
    """

    def __init__(
        self, what: str, seconds: float, *, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start a wait of `seconds` for `what`, a text for log lines.

        `began` is the start on `clock`; None means now. Raises ValueError when `seconds` is not finite.
        """
        self.seconds = finite_seconds(seconds)
        self._description = what
        self._clock = clock
        self._start = clock() if began is None else began
        self._warnings = [share * seconds for share in _WARN_AT if share * seconds >= _QUIET_SECONDS]

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._start

    def pause(self, missing: Callable[[], str], *, end: float | None = None) -> float | None:
        """Return how many seconds the caller may sleep at most, or None when the deadline has passed.

        Logs `missing()` as a warning when 10 % or 50 % of the time has passed. `end` is an earlier end of the wait on the clock; None means
        that there is none.
        """
        elapsed = self.waited
        remaining = self.seconds - elapsed
        if end is not None:
            remaining = min(remaining, end - self._clock())
        if remaining <= 0:
            return None
        while self._warnings and elapsed >= self._warnings[0]:
            self._warnings.pop(0)
            logger.warning("waited %.0f of %.0f s for %s: %s", elapsed, self.seconds, self._description, missing())
        return min(remaining, *(warning_time - elapsed for warning_time in self._warnings[:1]), threading.TIMEOUT_MAX)
