"""Checks for `rljob validate` whether the environment of a job can be built here. User code is run in a child process."""

import asyncio
from collections.abc import Sequence

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.envs.process import EnvProcess
from rl_core.envs.source import env_source
from rl_core.messages.envs import EnvSettings


def check_env(spec: RLJobSpec, *, search_path: str | Sequence[str] = (), deadline: float | None = None) -> list[str]:
    """Return the problems of building `spec.env`, each as `path: rule, got value; way out`; empty if it can be built.

    `search_path` is one folder or several with user code, usually that of the job file. `deadline` is in seconds; None =
    runtime.deadlines.envReset.
    """
    seconds = spec.runtime.deadlines.env_reset if deadline is None else deadline
    try:
        source = env_source(
            spec.env,
            seed=spec.algorithm.seed,
            extensions=spec.extensions,
            search_path=[search_path] if isinstance(search_path, str) else list(search_path),
        )
        asyncio.run(_build_once(source, seconds))
    except (ConfigError, DeadlineExceeded, InfrastructureError) as error:
        return [_located(line) for line in str(error).splitlines()]
    return []


async def _build_once(source: EnvSettings, seconds: float) -> None:
    child = await EnvProcess.start(source, deadline=seconds)
    await child.kill()


def _located(problem: str) -> str:
    """Return the problem prefixed with the path of its field."""
    return f"spec.{problem}" if problem.startswith(("env.", "extensions:")) else f"spec.env.type: {problem}"
