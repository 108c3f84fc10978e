"""`Generation`: pauses and continues the generation of an engine."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from rl_core.rollouts.sglang.child.adapters import ChildAdapters


class Generation:
    """Whether the rows of one engine run."""

    def __init__(self, manager: Any, adapters: ChildAdapters) -> None:
        """`manager` is the engine's tokenizer manager."""
        self._manager, self._adapters = manager, adapters

    async def pause(self, mode: str) -> None:
        """Pause generation, and return when no row is generating any more. `mode` is that of SGLang: in_place, retract or abort.

        With adapters, the mode is always abort, because SGLang would continue the rows with the previous adapter. The worker requests them
        again.
        """
        self._adapters.pause()
        mode = "abort" if self._adapters.enabled else mode
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await self._manager.get_internal_state()  # the scheduler answers this after it has paused

    async def resume(self) -> None:
        """Continue; rows that were aborted begin with the adapter that is served now."""
        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._adapters.resume()
