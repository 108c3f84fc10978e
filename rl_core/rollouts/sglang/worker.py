"""`SGLangWorker`: the public name of a rollout worker whose job says `rollout.engine: sglang`, with what only this engine offers."""

from __future__ import annotations

import asyncio
from typing import Literal

from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.sglang.engine import SGLangEngine

PauseMode = Literal["in_place", "retract", "abort"]
"""in_place: rows keep their keys and values; retract: they are computed anew; abort: rows are cut, and go on from their tokens."""


class SGLangWorker(RolloutWorkerBase):
    """Generates with the SGLang engine (`sglang.served`) and scores with the job's env workers."""

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Let no row get a further token until `continue_generation`; rows are neither lost nor given back."""
        await self._engine_call("pause", mode=mode)

    async def continue_generation(self) -> None:
        """Let paused rows go on, with the weights that the engine has then."""
        await self._engine_call("go_on")

    async def _engine_call(self, method: str, **arguments: str) -> None:
        engine = self._built().engine.engine  # type: ignore[attr-defined]
        assert isinstance(engine, SGLangEngine)
        answer = asyncio.wrap_future(engine.call(method, **arguments))
        await asyncio.wait_for(answer, self.spec.runtime.deadlines.rpc)
