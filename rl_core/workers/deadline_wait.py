"""A wait with a deadline that logs what it waits for after 10 % and after 50 % of its time."""

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
    """One wait of at most `seconds` for `what`. The caller sleeps at most `pause()` seconds, looks again, and asks for the next pause."""

    def __init__(
        self, what: str, seconds: float, *, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin at `began` on the clock (None: now). Raises ValueError when `seconds` is not finite."""
        self.seconds = finite_seconds(seconds)
        self._what = what
        self._clock = clock
        self._began = clock() if began is None else began
        self._warnings = [share * seconds for share in _WARN_AT if share * seconds >= _QUIET_SECONDS]

    @property
    def waited(self) -> float:
        """Return the seconds since the wait began."""
        return self._clock() - self._began

    def pause(self, missing: Callable[[], str], *, end: float | None = None) -> float | None:
        """Return the seconds to sleep at most, None when the deadline has passed. Logs `missing()` when a warning is due.

        `end`: a time of the clock at which the wait ends earlier.
        """
        waited = self.waited
        left = self.seconds - waited
        if end is not None:
            left = min(left, end - self._clock())
        if left <= 0:
            return None
        while self._warnings and waited >= self._warnings[0]:
            self._warnings.pop(0)
            logger.warning("waited %.0f of %.0f s for %s: %s", waited, self.seconds, self._what, missing())
        return min(left, *(at - waited for at in self._warnings[:1]), threading.TIMEOUT_MAX)
