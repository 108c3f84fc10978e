"""`HFResidency`: moves the weights and the KV cache of the HF engine on and off its device."""

from __future__ import annotations

from collections.abc import Collection

from rl_core.rollouts.adapters import AdapterMerge
from rl_core.rollouts.engine import Part
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.weights.offload import Offloader, empty_device_cache


class HFResidency:
    """Implements `Residency`. While a part is off the device the engine is paused; its rows continue once all parts are back."""

    def __init__(self, loop: EngineLoop, adapters: AdapterMerge | None = None) -> None:
        """Move the parts of the engine of `loop`, and its `adapters` with the weights."""
        self._adapters = adapters
        self._loop, self._engine = loop, loop.engine
        self._device = self._engine.device
        self._weights = Offloader(pin=self._device.type == "cuda")
        self._offloaded: set[Part] = set()

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`, the KV cache first. Blocks until nothing generates."""
        if not parts:
            return
        self._loop.pause()
        if "kv_cache" in parts:
            self._engine.release_cache()
        if "weights" in parts and not self._weights.is_offloaded:
            adapters = self._adapters.tensors().values() if self._adapters is not None else ()
            self._weights.offload([*self._engine.stored_weights(), *adapters])
        empty_device_cache(self._device)
        self._offloaded.update(parts)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back; the cache is allocated again when rows need it."""
        if "weights" in parts:
            self._weights.reload()
        self._offloaded.difference_update(parts)
        if not self._offloaded:
            self._loop.resume()
