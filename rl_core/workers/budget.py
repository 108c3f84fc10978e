"""A limit on restarts within a sliding window of time. Pure; the clock is injected."""

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Allows `limit` restarts within `window` seconds."""

    def __init__(self, limit: int = 3, window: float = 600.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no restarts used. `window` is in seconds; `clock` returns seconds."""
        self._limit = limit
        self._window = window
        self._clock = clock
        self._restart_times: deque[float] = deque()

    @property
    def used(self) -> int:
        """Number of restarts used within the last `window` seconds."""
        now = self._clock()
        while self._restart_times and now - self._restart_times[0] > self._window:
            self._restart_times.popleft()
        return len(self._restart_times)

    def take(self) -> bool:
        """Use one restart. Returns False, and uses none, when `limit` restarts are used."""
        if self.used >= self._limit:
            return False
        self._restart_times.append(self._clock())
        return True

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart that was just taken: 0 for the first within the window, then 1, 2, 4 and so on."""
        return 0.0 if self.used <= 1 else float(2 ** (self.used - 2))
