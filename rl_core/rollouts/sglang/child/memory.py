"""`EngineMemory`: releases the engine's device memory for the trainer, and proves when it is restored that the weights are unchanged.

`release` retracts running rows to the engine's queue, takes checksums, drops caches and unmaps memory. `restore` maps memory again, part
by part; with the last part it compares checksums and continues the rows. Without SGLang's memory saver, which needs CUDA, the engine is
paused but keeps its memory.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

from rl_core.rollouts.sglang.child.generation import Generation
from rl_core.rollouts.sglang.child.weights import ChildWeightLoader


class EngineMemory:
    """Releases and restores the device memory of one engine."""

    def __init__(self, manager: Any, loader: ChildWeightLoader, generation: Generation, *, frees: bool) -> None:
        """`manager` is the engine's tokenizer manager; `frees`: whether the engine was started with the memory saver."""
        self._manager, self._loader, self._generation, self._frees = manager, loader, generation, frees
        self._released: set[str] = set()
        self._sums_before_release: tuple[int, list[dict[str, str]]] = (0, [])
        """Number of weight updates, and the checksums of every rank, when the first part was released."""

    async def release(self, parts: list[str]) -> None:
        """Free `parts`. Raises RuntimeError and frees nothing while a row runs, because SGLang's scheduler would die."""
        if not self._released:
            await self._generation.pause("retract")
            self._sums_before_release = (self._loader.updates, await self._loader.checksums_of_ranks())
        if not (await self._manager.flush_cache()).success:
            raise RuntimeError("the engine's caches must be empty before its memory goes, it did not drop them")
        if self._frees:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=_tags(parts)), None)
        self._released.update(parts)

    async def restore(self, parts: list[str]) -> None:
        """Bring `parts` back; rows continue once all are. Raises RuntimeError if weights changed without an update."""
        restored = sorted(self._released.intersection(parts))
        if self._frees and restored:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=_tags(restored)), None)
        self._released.difference_update(restored)
        if self._released:
            return
        update, sums = self._sums_before_release
        if update == self._loader.updates and sums != await self._loader.checksums_of_ranks():
            raise RuntimeError("the engine's weights must be those of before it gave its memory away, got others back")
        await self._generation.resume()


def _tags(parts: list[str]) -> list[str]:
    """Return SGLang's names of `parts`. The buffers of CUDA graphs, which only generation needs, go with the KV cache."""
    return [*parts, GPU_MEMORY_TYPE_CUDA_GRAPH] if GPU_MEMORY_TYPE_KV_CACHE in parts else list(parts)
