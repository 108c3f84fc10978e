"""`SGLangResidency`: moves the weights and the KV cache of the SGLang engine on and off its device."""

from __future__ import annotations

from collections.abc import Collection

from rl_core.rollouts.engine import Part
from rl_core.rollouts.sglang.engine import SGLangEngine


class SGLangResidency:
    """Implements `Residency` by calls of the child process (`child.memory`). Paused rows continue once all parts are back."""

    def __init__(self, engine: SGLangEngine, seconds: float) -> None:
        """`seconds` is the deadline of one call of the engine."""
        self._engine, self._seconds = engine, seconds
        self._offloaded: set[Part] = set()

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`. Raises InfrastructureError if the engine fails to."""
        if selected := sorted(set(parts) - self._offloaded):
            self._engine.call("release_memory", parts=selected).result(self._seconds)
            self._offloaded.update(selected)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back. Raises InfrastructureError if the weights differ from those that were offloaded and were not replaced."""
        if selected := sorted(set(parts) & self._offloaded):
            self._engine.call("restore_memory", parts=selected).result(self._seconds)
            self._offloaded.difference_update(selected)
