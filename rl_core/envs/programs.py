"""`ProgramEnvironment`: the base of environments that run one program per sample, which calls the model itself.

A program gets the row, a base URL, an API key and the name of the model. It returns a number, None (not applicable: the sample is
masked), or an object or mapping with `reward` and, optionally, `parts` (name -> number, reported as metrics). All rows of a call run at
the same time.

A program that raises, returns anything else, or does not end in time has no reward; the rollout fails its sample. The failure of one
program does not affect others. A thread cannot be ended from outside, so if a program in a thread is late, the process ends after its
answer.
"""

import abc
import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from rl_core.api.errors import RolloutDataFailure, text_of
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.rewards import explanation_of, read_reward
from rl_core.api.user_code import describe
from rl_core.envs.base import EnvConfig, Log
from rl_core.messages.agents import BRANCHES, MAX_CALLS, REQUEST, RESULT, AgentRequest, AgentResult, Branches

logger = logging.getLogger(__name__)
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 8.0
"""Delay before a run is repeated; each is twice as long as the one before."""


class RunFailed(Exception):
    """Raised if what the program depends on has failed, such as a server, and not the program itself. It may be run again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRun:
    """The result of a program that saw the tokens of its calls."""

    reward: float | None
    """None: the sample is masked."""
    parts: Mapping[str, float] = field(default_factory=dict)
    generated: list[list[int]] = field(default_factory=list)
    """Sampled tokens of its calls."""


class ProgramConfig(EnvConfig):
    """Options that all environments with a program have."""

    max_calls: int = Field(MAX_CALLS, ge=1, le=4096)
    """Largest number of model calls of a sample."""
    branches: Branches = BRANCHES
    """Reward of each branch of a conversation: the `whole` reward, `equal` parts of it, or only the `last` branch is trained."""


class ProgramEnvironment(EnvironmentInterface):
    """Runs the program for each row."""

    def __init__(self, label: str) -> None:
        """`label` names the program in errors: `agent calculator:run`."""
        self.label = label
        self.runs = 1
        """How often a program is run, in total, while runs fail with RunFailed."""
        self.unready = ""
        """Why programs cannot run yet; "" = they can. A program that is late for this reason counts as unavailable and not as failed."""
        self._sleep = asyncio.sleep
        self.spent = False
        """Whether this process must end, because a program still runs in a thread of it."""

    @abc.abstractmethod
    async def call(self, row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
        """Run the program for `row` and return its result. The call is cancelled when the time of the program is over."""

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
        result = AgentResult(run="", error="", late=False, parts={}, unavailable=False, generated=[])
        try:
            async with asyncio.timeout(request["seconds"]) as limit:
                scored = await self._returned(row, request, result)
            reward, result["parts"] = read_reward(scored)
            if text := explanation_of(scored):
                result["explanation"] = text
            result["generated"] = scored.generated if isinstance(scored, ScoredRun) else []
        except TimeoutError as error:
            if not limit.expired():
                return None, self._failed(result, error)
            result["late"], result["unavailable"] = not self.unready, bool(self.unready)
            cause = f": {self.unready}" if self.unready else ""
            result["error"] = f"{self.label} must end within {request['seconds']:g} s, it did not{cause}"
            return None, result
        except RolloutDataFailure as error:
            result["error"] = text_of(error)
            return None, result
        except RunFailed as error:
            result["unavailable"] = True
            result["error"] = f"{self.label} failed {self.runs} times in succession, the last time with {error}"
            return None, result
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
            return None, self._failed(result, error)
        return reward, result

    async def _returned(self, row: dict[str, Any], request: AgentRequest, result: AgentResult) -> Any:
        """Run the program, again after RunFailed, and return its result. Each run has a new id, so that only its own calls are recorded with it."""
        for attempt in range(self.runs):
            result["run"] = secrets.token_hex(8)
            try:
                return await self.call(
                    row,
                    base_url=request["base_url"],
                    api_key=f"{request['api_key']}.{result['run']}",
                    model=request["model"],
                )
            except RunFailed as error:
                if attempt + 1 == self.runs:
                    raise
                logger.warning("%s failed and is run again: %s", self.label, error)
                await self._sleep(min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**attempt))
        raise AssertionError("bug: a program without a run")

    def _failed(self, result: AgentResult, error: BaseException) -> AgentResult:
        result["error"] = f"{self.label} must return a reward, it raised {describe(error)}"
        return result

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run `function` in a new thread and return its result. If the wait is cancelled, the thread goes on and this process is `spent`."""
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
                value = function()
            except StopIteration as error:  # A future cannot hold this exception.
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
