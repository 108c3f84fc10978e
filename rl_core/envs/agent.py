"""The environment `agent`: runs a function of the user once per sample and returns its reward.

The function is `run(row, base_url, api_key, model)`, sync or async. It calls the model at `base_url` with any OpenAI client. Async
functions run on the event loop, others in a thread each. `ProgramEnvironment` documents what they may return and how failures are handled.
"""

import functools
import inspect
from typing import Any

from pydantic import Field

from rl_core.api.user_code import import_reference
from rl_core.envs.base import parse_config
from rl_core.envs.programs import ProgramConfig, ProgramEnvironment


class AgentConfig(ProgramConfig):
    """Options of `agent`."""

    agent: str = Field(min_length=1)
    """`module:function`; `env.agent` in a job."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every run."""


class AgentEnvironment(ProgramEnvironment):
    """Runs the function for each row."""

    config_model = AgentConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(AgentConfig, cfg)
        super().__init__(f"agent {self.config.agent}")
        self._function = import_reference(self.config.agent, field="env.agent")
        self._is_async = inspect.iscoroutinefunction(self._function)

    async def call(self, row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
        """Return what the function returns."""
        function = functools.partial(
            self._function,
            **{**self.config.arguments, "row": row, "base_url": base_url, "api_key": api_key, "model": model},
        )
        return await (function() if self._is_async else self.in_thread(function))
