"""`EngineMeter`: the engine metrics that heartbeats report: tokens per second, rows, use of the KV cache, prefix hits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_WINDOW_S = 1.0
"""Shortest time over which rates are computed; earlier reads return the last rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is. A metric whose value is None, or whose counters stay 0, is not reported."""

    running: int = 0
    """Running rows."""
    waiting: int = 0
    """Rows that wait for a place in the batch."""
    kv_use: float | None = None
    """Fraction of the KV cache in use; None if unknown."""
    queued_seconds: float = 0.0
    """Total seconds that rows waited for a place in the batch, over all rows that got one."""
    queued_rows: int = 0
    """Number of those rows."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, over all rows that ended."""
    prompt_tokens: int = 0
    """Prompt tokens of those rows."""


class EngineMeter:
    """Computes rates from the engine's counters. All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._load: Callable[[], EngineLoad] = EngineLoad
        self._clock = clock
        self._lock = threading.Lock()
        """Guards `_tokens`, which the engine's thread and the heartbeats change."""
        self._tokens = 0
        self._last_read, self._last_load = clock(), EngineLoad()
        self._last_metrics: dict[str, float] = {}

    def watch(self, load: Callable[[], EngineLoad]) -> None:
        """Read the engine's counters with the function `load` from now on."""
        self._load, self._last_read, self._last_load = load, self._clock(), load()

    def count(self, tokens: int) -> None:
        """Add `tokens` to the number of generated tokens."""
        with self._lock:
            self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Return `rollout/{tokens_per_second,running,waiting,kv_use,queue_seconds,prefix_hit_share}`, those that the engine reports."""
        now, load = self._clock(), self._load()
        if self._last_metrics and now - self._last_read < SHORTEST_WINDOW_S:
            return self._last_metrics
        with self._lock:
            tokens, self._tokens = self._tokens, 0
        previous, seconds = self._last_load, max(now - self._last_read, 1e-9)
        metrics: dict[str, float | None] = {
            "tokens_per_second": tokens / seconds,
            "running": load.running,
            "waiting": load.waiting,
            "kv_use": load.kv_use,
            "queue_seconds": _mean(
                load.queued_seconds - previous.queued_seconds, load.queued_rows - previous.queued_rows
            ),
            "prefix_hit_share": _mean(
                load.cached_tokens - previous.cached_tokens, load.prompt_tokens - previous.prompt_tokens
            ),
        }
        self._last_read, self._last_load = now, load
        self._last_metrics = {f"rollout/{name}": float(value) for name, value in metrics.items() if value is not None}
        return self._last_metrics


def _mean(total: float, count: int) -> float | None:
    """Return total / count; None if count is 0, or negative because the engine was restarted."""
    return total / count if count > 0 else None
