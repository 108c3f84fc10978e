"""`SGLangWorker`: the rollout worker of a job with `rollout.engine: sglang`."""

from __future__ import annotations

from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.sglang.engine import PauseMode, SGLangEngine
from rl_core.rollouts.sglang.rollout_engine import SGLangRolloutEngine


class SGLangWorker(RolloutWorkerBase):
    """Generates with the SGLang engine, in a child process, and scores with the job's env workers."""

    build_engine = SGLangRolloutEngine.build

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Pause generation in the given mode, and return when no row is generating any more. No row is lost."""
        await self._sglang().pause(mode, self.spec.runtime.deadlines.rpc)

    async def continue_generation(self) -> None:
        """Continue paused rows, with the weights that the engine has now."""
        await self._sglang().resume(self.spec.runtime.deadlines.rpc)

    def _sglang(self) -> SGLangEngine:
        engine = self._built().engine
        assert isinstance(engine, SGLangRolloutEngine)
        return engine.engine
