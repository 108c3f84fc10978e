"""What of the SGLang engine lies on its device: `rollouts.engine.Residency` over `memory.DeviceMemory` in the child process."""

from __future__ import annotations

from collections.abc import Collection

from rl_core.rollouts.engine import Part
from rl_core.rollouts.sglang.engine import SGLangEngine


class EngineResidency:
    """Implements `Residency`. While a part is away nothing generates; rows that are left go on once all is back."""

    def __init__(self, engine: SGLangEngine, seconds: float) -> None:
        """`seconds` bound one answer of the engine."""
        self._engine, self._seconds = engine, seconds
        self._away: set[Part] = set()

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`. Raises InfrastructureError when the engine does not."""
        if gone := sorted(set(parts) - self._away):
            self._engine.call("release_memory", parts=gone).result(self._seconds)
            self._away.update(gone)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back. Raises InfrastructureError when the weights are not those that went, and were not replaced since."""
        if back := sorted(set(parts) & self._away):
            self._engine.call("restore_memory", parts=back).result(self._seconds)
            self._away.difference_update(back)
