"""The env worker: serves the steps of an environment to rollouts by RPC. User code runs in its child processes only.

User code is imported from PYTHONPATH, to whose front the launcher adds the folder of the job file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_core.api.errors import InfrastructureError
from rl_core.api.roles import EnvSpec
from rl_core.api.settings import DeadlinesSpec
from rl_core.envs.background import BackgroundPool
from rl_core.envs.pool import EnvPool
from rl_core.envs.source import env_source
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow
from rl_core.observability import events
from rl_core.workers.worker import Worker


class TextEnvWorker(Worker):
    """Steps message logs in a pool of `env.processes` child processes; ready once all of them have built the environment."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {"rollout": frozenset({"step_rows"})}

    def __init__(
        self,
        cfg: EnvSpec | Mapping[str, Any] | None = None,
        *,
        deadlines: DeadlinesSpec | Mapping[str, Any] | None = None,
    ) -> None:
        """Start the pool of `cfg` (`spec.env`; None = the job's).

        Raises ConfigError when the environment cannot be built, DeadlineExceeded when it takes longer than envReset.
        """
        spec = self.job.spec if self.job is not None else None
        env = cfg if cfg is not None else (spec.env if spec is not None else EnvSpec())
        env = env if isinstance(env, EnvSpec) else EnvSpec.model_validate(dict(env))
        bounds = (
            deadlines if deadlines is not None else (spec.runtime.deadlines if spec is not None else DeadlinesSpec())
        )
        bounds = bounds if isinstance(bounds, DeadlinesSpec) else DeadlinesSpec.model_validate(dict(bounds))
        source = env_source(
            env,
            seed=spec.algorithm.seed if spec is not None else 0,
            extensions=spec.extensions if spec is not None else None,
        )
        pool = EnvPool(
            source,
            processes=env.processes,
            step_deadline=bounds.env_step,
            start_deadline=bounds.env_reset,
            on_event=self._report_process,
            waiting=lambda process: self.waiting("step of user code", f"{self.identity.name}/{process}"),
        )
        self._pool: BackgroundPool | None = BackgroundPool(pool)

    async def step_rows(self, rows: Sequence[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return one answer per row, in order; every row fails separately, and no failure becomes a reward."""
        if self._pool is None:
            raise InfrastructureError("the env worker is closed; call another")
        answers = await self._pool.step_rows(list(rows))
        self.record_progress("env_steps", len(answers))
        for name, count in self._pool.pool.counters.items() if self._pool is not None else ():
            self.record_metric(f"env/{name}_total", count)
        return answers

    async def status(self) -> dict[str, Any]:
        """Return processes, queue and counters of the pool."""
        return {} if self._pool is None else self._pool.pool.status()

    async def health(self) -> bool:
        """Return whether at least one process can serve."""
        return self._pool is not None and any(process["pid"] for process in self._pool.pool.status()["processes"])

    def close(self) -> None:
        """Kill the child processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _report_process(self, event: str, pid: int, index: int) -> None:
        """Report the start and end of a child process to the launcher's list of processes."""
        name = f"env-child-{index}"
        if event == "started":
            events.report(event, name=name, pid=pid, parent=os.getpid(), rank=self.rank, process="env-child")
        else:
            events.report(event, name=name, pid=pid, code=None, reason="")
