"""Exponential back-off: the pauses between attempts of one operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_DOUBLINGS = 20
"""Bounds the exponent, so that a counter that grows for months cannot overflow a float."""


def no_jitter() -> float:
    """Return 1: the pauses are not randomized."""
    return 1.0


@dataclass(slots=True)
class Backoff:
    """The attempts of one operation and the time of the next one.

    The pause doubles from `first` up to `longest`, and each pause is multiplied by `jitter()`. Times are in seconds, on the clock of the
    caller.
    """

    first: float
    """Pause after the first attempt that counts."""
    longest: float
    """Largest pause."""
    free_attempts: int = 0
    """Number of attempts that are followed by no pause."""
    jitter: Callable[[], float] = no_jitter
    """Returns the factor of one pause, at most 1; random factors spread callers that failed at the same time."""
    attempts: int = 0
    """Attempts counted so far."""
    next_attempt: float = 0.0
    """Time of the next attempt."""

    def step(self, now: float, *, at_least: float = 0.0) -> float:
        """Count an attempt and return the pause before the next one, in seconds.

        `at_least` is the pause that the other side asks for (`Retry-After`). It is limited to `longest` as well.
        """
        self.attempts += 1
        num_paused = self.attempts - self.free_attempts
        pause = 0.0
        if num_paused > 0:
            pause = min(self.first * 2.0 ** min(num_paused - 1, MAX_DOUBLINGS), self.longest) * self.jitter()
        pause = min(max(pause, at_least), self.longest)
        self.next_attempt = now + pause
        return pause

    def remaining(self, now: float) -> float:
        """Return the seconds until the next attempt, 0 when it is due."""
        return max(self.next_attempt - now, 0.0)
