"""What a rollout's engine is doing, as the heartbeats tell it: tokens per second, rows, memory for keys and values, prefix hits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_WINDOW_S = 1.0
"""Rates are taken over at least so long; whoever reads sooner gets the last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """What an engine has to do. None, or 0 of a counter and its base: this engine does not say, so the number is absent."""

    running: int
    """Rows that generate."""
    waiting: int
    """Rows that wait for a place."""
    kv_use: float | None = None
    """Share of the memory for keys and values that rows use."""
    queued_seconds: float = 0.0
    """Seconds that rows waited for a place, of all rows that got one so far."""
    queued_rows: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there already, of all rows that ended so far."""
    prompt_tokens: int = 0


class Meter:
    """Turns counters into numbers of the last moment. `count` on the engine's thread, `read` on any other."""

    def __init__(self, load: Callable[[], EngineLoad], clock: Callable[[], float] = time.monotonic) -> None:
        self._load, self._clock = load, clock
        self._lock = threading.Lock()
        """Guards `_tokens`, which two threads change."""
        self._tokens = 0
        self._since, self._before = clock(), load()
        self._last: dict[str, float] = {}

    def count(self, tokens: int) -> None:
        """Count generated tokens."""
        with self._lock:
            self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Return `rollout/{tokens_per_second,running,waiting,kv_use,queue_seconds,prefix_hit_share}`, as far as the engine tells them."""
        now, load = self._clock(), self._load()
        if self._last and now - self._since < SHORTEST_WINDOW_S:
            return self._last
        with self._lock:
            tokens, self._tokens = self._tokens, 0
        before, seconds = self._before, max(now - self._since, 1e-9)
        found: dict[str, float | None] = {
            "tokens_per_second": tokens / seconds,
            "running": load.running,
            "waiting": load.waiting,
            "kv_use": load.kv_use,
            "queue_seconds": _mean(load.queued_seconds - before.queued_seconds, load.queued_rows - before.queued_rows),
            "prefix_hit_share": _mean(
                load.cached_tokens - before.cached_tokens, load.prompt_tokens - before.prompt_tokens
            ),
        }
        self._since, self._before = now, load
        self._last = {f"rollout/{name}": float(value) for name, value in found.items() if value is not None}
        return self._last


def _mean(total: float, count: int) -> float | None:
    """Return total / count; None where nothing happened, or where the engine began anew meanwhile."""
    return total / count if count > 0 else None
