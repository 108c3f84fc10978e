"""The env worker: serves the steps of an environment to rollouts by RPC. User code runs in its child processes only.

User code is imported from PYTHONPATH, to whose front the launcher adds the folder of the job file.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rl_core.api.env import EnvSpec
from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.api.settings import DeadlinesSpec
from rl_core.envs.pool import EnvPool
from rl_core.envs.source import env_source
from rl_core.envs.vector_worker import EnvWorker
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow, MemberCall
from rl_core.observability import events
from rl_core.workers.member_calls import MemberCaller
from rl_core.workers.worker import Worker

if TYPE_CHECKING:
    from rl_core.envs.sessions import SessionRouter

__all__ = ["EnvWorker", "TextEnvWorker"]
CALL_SHARE = 0.8
"""Share of the deadline of a step that one call to a group may take, so that its failure arrives before that of the step."""
T = TypeVar("T")


class TextEnvWorker(Worker):
    """Steps message logs in a pool of `env.processes` child processes; ready once all of them have built the environment."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {"rollout": frozenset({"step_rows", "held_sessions"})}

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
        self._members = MemberCaller(self)
        self._call_seconds = CALL_SHARE * bounds.env_step
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
            call_member=self._call_member,
        )
        self._pool: BackgroundPool | None = BackgroundPool(pool, routed=env.calls_model)

    async def step_rows(self, rows: Sequence[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return one answer per row, in order; every row fails separately, and no failure becomes a reward."""
        if self._pool is None:
            raise InfrastructureError("the env worker is closed; call another")
        answers = await self._pool.step_rows(list(rows))
        self.record_progress("env_steps", len(answers))
        for name, count in self._pool.counters.items() if self._pool is not None else ():
            self.record_metric(f"env/{name}_total", count)
        return answers

    async def held_sessions(self, keys: Sequence[str]) -> list[str]:
        """Return those of the samples `keys` whose agent programs run here, or have just ended."""
        return [] if self._pool is None else await self._pool.held_sessions(keys)

    async def on_new_epoch(self, epoch: int) -> None:
        """End the sessions of agent programs: their tokens may be of weights that were lost with the trainer."""
        if self._pool is not None:
            await self._pool.end_sessions()

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

    async def _call_member(self, call: MemberCall) -> Any:
        """Call a member of a group for the environment's code. Raises InfrastructureError when none answers in time."""
        try:
            return await self._members.call(call.group, call.method, *call.arguments, seconds=self._call_seconds)
        except DeadlineExceeded as error:
            raise InfrastructureError(str(error)) from error

    def _report_process(self, event: str, pid: int, index: int) -> None:
        """Report the start and end of a child process to the launcher's list of processes."""
        name = f"env-child-{index}"
        if event == "started":
            events.report(event, name=name, pid=pid, parent=os.getpid(), rank=self.rank, process="env-child")
        else:
            events.report(event, name=name, pid=pid, code=None, reason="")


class BackgroundPool:
    """An `EnvPool` with an event loop and a thread of its own, for use from any thread or event loop.

    The kernel kills an env child when the thread that started it ends; this thread lives as long as the pool.
    """

    def __init__(self, pool: EnvPool, *, routed: bool = False) -> None:
        """Start the pool's processes and wait for them. `routed`: they run agent programs. Raises what `EnvPool.start` raises."""
        self.pool = pool
        self._router: SessionRouter | None = None
        if routed:  # Other env workers need no HTTP server, so they do not load it.
            from rl_core.envs import sessions

            self._router = sessions.SessionRouter(pool)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="env-pool", daemon=True)
        self._thread.start()
        try:
            self._submit(self._start()).result()
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self) -> None:
        await self.pool.start()
        if self._router is not None:
            await self._router.start()

    @property
    def counters(self) -> dict[str, int]:
        """Return the counts of the pool and of the sessions of agent programs."""
        return {**self.pool.counters, **(self._router.counters if self._router is not None else {})}

    async def step_rows(self, rows: list[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return the pool's answers. If the call is cancelled, the rows are dropped; agent programs go on for a while."""
        return await asyncio.wrap_future(self._submit((self._router or self.pool).step_rows(rows)))

    async def held_sessions(self, keys: Sequence[str]) -> list[str]:
        """Return those of the samples `keys` that have a session."""

        async def held() -> list[str]:
            return [] if self._router is None else self._router.held(keys)

        return await asyncio.wrap_future(self._submit(held()))

    async def end_sessions(self) -> None:
        """End the sessions of all agent programs."""

        async def end() -> None:
            if self._router is not None:
                self._router.end_all()

        await asyncio.wrap_future(self._submit(end()))

    def close(self) -> None:
        """Kill the processes and end the thread; idempotent."""
        if self._thread.is_alive():
            self._submit(self._close()).result()
            self._stop_loop()

    async def _close(self) -> None:
        if self._router is not None:
            await self._router.close()
        await self.pool.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
