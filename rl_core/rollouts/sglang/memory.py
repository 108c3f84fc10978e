"""Gives the engine's device memory to the trainer for a while, and proves on its return that the weights are still the same. In the child process.

release: rows go back to the engine's queue, caches are dropped, checksums taken, memory unmapped -> restore: mapped again, in parts; with
the last part checksums are compared and rows go on. Without SGLang's memory saver, which needs CUDA, the engine only rests.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from rl_core.rollouts.sglang.loader import Loader


class DeviceMemory:
    """What of one engine lies on its devices."""

    def __init__(self, manager: Any, loader: Loader, *, frees: bool) -> None:
        """`manager` is the engine's tokenizer manager; `frees`: whether the engine was started with the memory saver."""
        self._manager, self._loader, self._frees = manager, loader, frees
        self._away: set[str] = set()
        self._before: tuple[int, list[dict[str, str]]] = (0, [])
        """Number of the last update when the first part went, and the checksums of each rank then."""

    async def release(self, parts: list[str]) -> None:
        """Free `parts`. Raises RuntimeError, and frees nothing, while something still runs: the engine's scheduler would die of it."""
        if not self._away:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            await self._manager.get_internal_state()  # the scheduler does as it is told before it answers this
            self._before = (self._loader.updates, await self._loader.checksums_of_ranks())
        if not (await self._manager.flush_cache()).success:
            raise RuntimeError("the engine's caches must be empty before its memory goes, it did not drop them")
        if self._frees:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=parts), None)
        self._away.update(parts)

    async def restore(self, parts: list[str]) -> None:
        """Bring `parts` back; with the last of them rows go on. Raises RuntimeError when weights that nobody updated are others than before."""
        back = sorted(self._away.intersection(parts))
        if self._frees and back:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=back), None)
        self._away.difference_update(back)
        if self._away:
            return
        update, sums = self._before
        if update == self._loader.updates and sums != await self._loader.checksums_of_ranks():
            raise RuntimeError("the engine's weights must be those of before it gave its memory away, got others back")
        await self._manager.continue_generation(ContinueGenerationReqInput())
