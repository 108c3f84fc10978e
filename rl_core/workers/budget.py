"""A limit on restarts within a sliding window of time. Pure; the clock is injected."""

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Allows `limit` restarts within `window` seconds. The first is immediate; later ones are delayed by `pause`."""

    def __init__(self, limit: int = 3, window: float = 600.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._window = window
        self._clock = clock
        self._taken: deque[float] = deque()

    @property
    def used(self) -> int:
        """Return the restarts taken inside the window that ends now."""
        now = self._clock()
        while self._taken and now - self._taken[0] > self._window:
            self._taken.popleft()
        return len(self._taken)

    def take(self) -> bool:
        """Take one restart; False when the budget is used up."""
        if self.used >= self._limit:
            return False
        self._taken.append(self._clock())
        return True

    @property
    def pause(self) -> float:
        """Return the seconds to wait before the restart just taken: 0, 1, 2, 4 ..."""
        return 0.0 if self.used <= 1 else float(2 ** (self.used - 2))
