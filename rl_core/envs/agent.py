"""The environment `agent`: runs a function or a program of the user once per sample and returns its reward.

A function is `run(row, base_url, api_key, model)`, sync or async. It calls the model at `base_url` with any OpenAI client. Async functions run
on the event loop, others in a thread each. A program is a child process (`command`); its last line is what a function would return, or a reward
function scores what it printed. `ProgramEnvironment` documents what they may return and how failures are handled.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import Field

from rl_core.api.errors import ConfigError
from rl_core.api.rewards import TOTAL
from rl_core.api.user_code import import_reference
from rl_core.envs.base import parse_config
from rl_core.envs.command import Command, last_json
from rl_core.envs.programs import ProgramConfig, ProgramEnvironment
from rl_core.envs.reward import RewardEnvironment

Run = Callable[..., Awaitable[Any]]
"""Runs the user's code with `row`, `base_url`, `api_key` and `model`."""


class AgentConfig(ProgramConfig):
    """Options of `agent`."""

    agent: str | None = Field(None, min_length=1)
    """`module:function`; `env.agent` in a job."""
    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments; `env.command` in a job."""
    reward: str | None = Field(None, min_length=1)
    """`module:function` or a registered reward, which scores what the program of `command` prints; None = its last line is the reward."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every call of the function or of `reward`."""


class AgentEnvironment(ProgramEnvironment):
    """Runs the function or the program for each row."""

    config_model = AgentConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = config = parse_config(AgentConfig, cfg)
        super().__init__(f"agent {config.agent or ' '.join(config.command or ())}")
        if config.agent is not None and config.command is None and config.reward is None:
            self._run_one = self._of_function(config.agent)
        elif config.command is not None and config.agent is None:
            self._run_one = self._of_command(config.command, config.reward)
        else:
            raise ConfigError(
                "env.agent: must be given alone, or env.command with or without env.options.reward, "
                f"got agent {config.agent}, command {config.command} and reward {config.reward}; correct it"
            )

    async def call(self, row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
        """Return what the function returns, or the reward of what the program prints."""
        return await self._run_one(row=row, base_url=base_url, api_key=api_key, model=model)

    def _of_function(self, reference: str) -> Run:
        function = import_reference(reference, field="env.agent")
        passed = dict.fromkeys(("row", "base_url", "api_key", "model"))
        try:
            inspect.signature(function).bind(**{**self.config.arguments, **passed})
        except TypeError as error:
            raise ConfigError(
                f"env.agent: {reference} must take the arguments {', '.join(passed)}, which are passed by these names, "
                f"and those of env.options.arguments; {error}"
            ) from error
        is_async = inspect.iscoroutinefunction(function)

        async def run(**passed: Any) -> Any:
            call = functools.partial(function, **{**self.config.arguments, **passed})
            return await (call() if is_async else self.in_thread(call))

        return run

    def _of_command(self, arguments: list[str], reward: str | None) -> Run:
        command = Command(arguments)
        if reward is None:
            if self.config.arguments:
                raise ConfigError(
                    f"env.options.arguments: need env.options.reward with env.command, got {self.config.arguments}; append them to env.command"
                )

            async def run(**given: Any) -> Any:
                return last_json(await command.run(**given), label=self.label)

            return run
        scorer = RewardEnvironment({"reward": reward, "arguments": self.config.arguments})

        async def run_and_score(**given: Any) -> Any:
            return await _score(scorer, given["row"], await command.run(**given))

        return run_and_score


async def _score(scorer: RewardEnvironment, row: dict[str, Any], printed: str) -> Any:
    """Return the reward of what a program printed, with its parts if it has any; the reward function gets it as the completion."""
    prompt = row.get("prompt", "")
    log = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    scored = scorer.step([[*log, {"role": "assistant", "content": printed}]], [row])
    if inspect.isawaitable(scored):
        scored = await scored
    if isinstance(scored.rewards, Mapping):
        parts = {name: values[0] for name, values in scored.rewards.items()}
        return {TOTAL: parts.pop(TOTAL), "parts": parts}
    [reward] = scored.rewards
    return None if reward is None else float(reward)
