"""What of the HF engine lies on its device: `rollouts.engine.Residency` over weights and KV cache."""

from __future__ import annotations

from collections.abc import Collection

from rl_core.rollouts.engine import Part
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.weights.offload import Offloader, give_back


class EngineResidency:
    """Implements `Residency`. While a part is away the engine holds: rows that are left are parked and go on once all is back."""

    def __init__(self, loop: EngineLoop) -> None:
        """Move the parts of the engine of `loop`."""
        self._loop, self._engine = loop, loop.engine
        self._device = self._engine.device
        self._weights = Offloader(pin=self._device.type == "cuda")
        self._away: set[Part] = set()

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`, the KV cache first. Blocks until nothing generates."""
        if not parts:
            return
        self._loop.hold()
        if "kv_cache" in parts:
            self._engine.release_cache()
        if "weights" in parts and not self._weights.is_offloaded:
            self._weights.offload(self._engine.stored_weights())
        give_back(self._device)
        self._away.update(parts)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back; the cache takes its memory with the rows."""
        if "weights" in parts:
            self._weights.reload()
        self._away.difference_update(parts)
        if not self._away:
            self._loop.release()
