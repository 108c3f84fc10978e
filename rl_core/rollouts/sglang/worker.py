"""`SGLangWorker`: the rollout worker of a job that says `rollout.engine: sglang`, with what only this engine offers."""

from __future__ import annotations

from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.sglang.engine import PauseMode, SGLangEngine


class SGLangWorker(RolloutWorkerBase):
    """Generates with the SGLang engine (`sglang.served`) and scores with the job's env workers."""

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Let no row get a further token until `continue_generation`; rows are neither lost nor given back."""
        await self._engine().pause(mode, self.spec.runtime.deadlines.rpc)

    async def continue_generation(self) -> None:
        """Let paused rows go on, with the weights that the engine has then."""
        await self._engine().go_on(self.spec.runtime.deadlines.rpc)

    def _engine(self) -> SGLangEngine:
        engine = self._built().engine.engine  # type: ignore[attr-defined]
        assert isinstance(engine, SGLangEngine)
        return engine
