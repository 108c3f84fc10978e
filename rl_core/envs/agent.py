"""The environment `agent`: runs a program of the user once per sample and returns its reward.

The program is a function `run(row, base_url, api_key, model)`, sync or async. It calls the model at `base_url` with any OpenAI client, and
returns a number, None (not applicable: the sample is masked), or an object or mapping with `reward` and, optionally, `parts` (name ->
number, reported as metrics). All rows of a call run at the same time: async functions on the event loop, others in a thread each.

A program that raises, returns anything else, or does not end in time has no reward; the rollout fails its sample. The failure of one program
does not affect others. A thread cannot be ended from outside, so if a program in a thread is late, the process ends after its answer.
"""

import asyncio
import inspect
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from pydantic import Field

from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.user_code import describe, import_reference
from rl_core.envs.base import EnvConfig, Log, parse_config
from rl_core.messages.agents import REQUEST, RESULT, AgentRequest, AgentResult

_MISSING = object()


class AgentConfig(EnvConfig):
    """Options of `agent`."""

    agent: str = Field(min_length=1)
    """`module:function`; `env.agent` in a job."""
    max_calls: int = Field(64, ge=1, le=4096)
    """Most model calls of a sample."""
    branches: Literal["whole", "equal", "last"] = "whole"
    """Reward of the branches of a conversation: the whole reward for each, equal parts of it, or nothing is trained but the last one."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every run."""


class AgentEnvironment(EnvironmentInterface):
    """Runs the program for each row."""

    config_model = AgentConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(AgentConfig, cfg)
        self._function = import_reference(self.config.agent, field="env.agent")
        self._is_async = inspect.iscoroutinefunction(self._function)
        self.spent = False
        """Whether this process must end, because a program still runs in a thread of it."""

    async def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Return the rewards of the runs, None where a run has none; the metadata says why."""
        runs = await asyncio.gather(*(self._run(metadata or {}) for metadata in metadata_batch))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in runs],
            metadata=[{RESULT: result} for _, result in runs],
            next_stop_strings=None,
            rewards=[reward for reward, _ in runs],
            terminateds=[True] * len(runs),
            answers=None,
        )

    async def _run(self, metadata: dict[str, Any]) -> tuple[float | None, AgentResult]:
        row = {key: value for key, value in metadata.items() if key != REQUEST}
        request: AgentRequest = metadata[REQUEST]
        result = AgentResult(run=secrets.token_hex(8), error="", late=False, parts={})
        arguments = {
            **self.config.arguments,
            "row": row,
            "base_url": request["base_url"],
            "api_key": f"{request['api_key']}.{result['run']}",
            "model": request["model"],
        }
        try:
            async with asyncio.timeout(request["seconds"]) as limit:
                returned = await (self._function(**arguments) if self._is_async else self._in_thread(arguments))
            reward, result["parts"] = read_reward(returned)
        except TimeoutError as error:
            if not limit.expired():
                return None, self._failed(result, error)
            result["late"] = True
            result["error"] = f"agent {self.config.agent} must end within {request['seconds']:g} s, it did not"
            return None, result
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
            return None, self._failed(result, error)
        return reward, result

    def _failed(self, result: AgentResult, error: BaseException) -> AgentResult:
        result["error"] = f"agent {self.config.agent} must return a reward, it raised {describe(error)}"
        return result

    async def _in_thread(self, arguments: Mapping[str, Any]) -> Any:
        """Return what the function returns in a thread of its own; a thread that is given up makes this process `spent`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def work() -> None:
            value: Any = None
            failure: BaseException | None = None
            try:
                value = self._function(**arguments)
            except StopIteration as error:  # a future cannot hold it
                failure = RuntimeError(f"StopIteration: {error}")
            except BaseException as error:  # noqa: BLE001 - the user's code raises anything, also SystemExit
                failure = error
            loop.call_soon_threadsafe(tell, value, failure)

        threading.Thread(target=work, name="agent", daemon=True).start()
        try:
            return await answer
        except asyncio.CancelledError:
            self.spent = True
            raise


def read_reward(returned: Any) -> tuple[float | None, dict[str, float]]:
    """Return (reward, parts) of what a program returned. Raises ValueError for anything that is no reward."""
    if returned is None or isinstance(returned, Real):
        return _number(returned, "the reward"), {}
    if isinstance(returned, Mapping):
        reward, parts = returned.get("reward", _MISSING), returned.get("parts")
    else:
        reward, parts = getattr(returned, "reward", _MISSING), getattr(returned, "parts", None)
    if reward is _MISSING:
        raise ValueError(
            f"an agent must return a number, None, or an object with `reward`, got {type(returned).__name__}; return one of these"
        )
    if parts is not None and not isinstance(parts, Mapping):
        raise ValueError(f"parts of a reward must be a mapping of names to numbers, got {type(parts).__name__}")
    numbers = {str(name): _number(value, f"part {name!r} of the reward") for name, value in (parts or {}).items()}
    return _number(reward, "the reward"), {name: value for name, value in numbers.items() if value is not None}


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    number = float(value) if isinstance(value, Real) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number or None, got {value!r}")
    return number
