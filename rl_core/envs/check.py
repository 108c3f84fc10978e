"""Checks for `rljob validate` whether the environment of a job can be built and called. User code is run in a child process."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, RolloutConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.rewards import total_reward
from rl_core.envs.process import EnvProcess
from rl_core.envs.source import env_source
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow, EnvSettings, MemberCall
from rl_core.plan.groups import ENV, groups_of

SHOWN = 3
"""Largest number of failing example rows that are reported."""

logger = logging.getLogger(__name__)


def check_env(
    spec: RLJobSpec,
    *,
    search_path: str | Sequence[str] = (),
    examples: Mapping[str, EnvRow] | None = None,
    deadline: float | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> list[str]:
    """Return the problems of building and calling `spec.env`, each as `path: rule, got value; way out`; empty if there are none.

    `search_path` is one folder or several with user code, usually that of the job file. `examples` are rows of the data by their place,
    with which the environment is called, as few times as possible; None = it is only built. `deadline` is in seconds; None =
    runtime.deadlines.envReset for the start and envStep for each call. `warn` is called for findings that are no errors but look like one.
    """
    bounds = spec.runtime.deadlines
    try:
        source = env_source(
            spec.env,
            seed=spec.algorithm.seed,
            extensions=spec.extensions,
            search_path=[search_path] if isinstance(search_path, str) else list(search_path),
        )
        problems = asyncio.run(
            _try(
                source,
                examples or {},
                spec,
                _Calls(spec),
                warn,
                deadline or bounds.env_reset,
                deadline or bounds.env_step,
            )
        )
    except (ConfigError, DeadlineExceeded, InfrastructureError) as error:
        problems = str(error).splitlines()
    return [_located(line, spec) for line in problems]


class _Calls:
    """Calls of an environment to groups of the job during a check. No group runs then, so each call is recorded and refused."""

    def __init__(self, spec: RLJobSpec) -> None:
        self._callers = {name: group.callers for name, group in groups_of(spec).items()}
        self.problems: list[str] | None = None
        """Problems of the calls so far; None if no group was called."""

    async def refuse(self, call: MemberCall) -> None:
        """Add the problem of `call` to `problems`, and raise ConfigError."""
        self.problems = self.problems or []
        if ENV not in self._callers.get(call.group, ()):
            present = "a group without it" if call.group in self._callers else f"the groups {', '.join(self._callers)}"
            self.problems.append(
                f"env.type: calls {call.group}.{call.method}, so spec.groups must have {call.group} with {ENV} in its callers, got {present}; add it"
            )
        raise ConfigError("no group runs while a job is checked")


async def _try(
    source: EnvSettings,
    examples: Mapping[str, EnvRow],
    spec: RLJobSpec,
    calls: _Calls,
    warn: Callable[[str], None],
    start_seconds: float,
    step_seconds: float,
) -> list[str]:
    """Return the problems of calling the environment with the example rows, those with the same columns in one call.

    If a call with several rows fails, each of them is tried alone. If the environment calls a group of the job, it is run up to that call.
    """
    max_turns = spec.env.max_turns
    child = await EnvProcess.start(source, deadline=start_seconds, quiet=True, call_member=calls.refuse)
    try:
        declared = child.max_turns or 1
        if declared > max_turns:
            return [
                f"env.maxTurns: must be at least {declared}, the max_turns that {source.type} declares, got {max_turns}; "
                f"set env.maxTurns: {declared}"
            ]
        failures: dict[str, str] = {}
        together: dict[str, str] = {}
        """Failures of calls with several rows."""
        answers: list[EnvAnswer] = []
        batches = _batches(examples)
        while batches:
            places = batches.pop(0)
            answer = await child.call([examples[place] for place in places], deadline=step_seconds)
            if calls.problems is not None:
                return calls.problems
            if not isinstance(answer, EnvFailure):
                answers += answer
            elif len(places) == 1:
                failures.setdefault(answer.message, places[0])
            else:
                together.setdefault(answer.message, f"{len(places)} rows")
                batches = [[place] for place in places] + batches
        if failures or together:
            return list(_failed(failures or together, source))
        if answers and not any(answer.terminated for answer in answers) and max_turns == 1:
            return [
                f"env.maxTurns: must be given for {source.type}, which did not end the episode in its first step, got 1; "
                "set it to the turns of an episode, or return terminateds true"
            ]
        if problem := next(filter(None, (_unusable(answer, spec) for answer in answers)), ""):
            return [problem]
        if answers and all(answer.reward is None and answer.terminated for answer in answers):
            warn(
                f"{source.label} returned None for every row that it was called with ({', '.join(examples)}): such samples are not trained; "
                "is a `return` missing?"
            )
        return []
    finally:
        await child.kill()


def _batches(examples: Mapping[str, EnvRow]) -> list[list[str]]:
    """Return the places of the rows in batches of rows with the same filled columns.

    In a call, a column that one row has exists for all of its rows, so rows with other columns would hide that it is missing.
    """
    batches: dict[frozenset[str], list[str]] = {}
    for place, row in examples.items():
        columns = frozenset(name for name, value in (row.metadata or {}).items() if value is not None)
        batches.setdefault(columns, []).append(place)
    return list(batches.values())


def _unusable(answer: EnvAnswer, spec: RLJobSpec) -> str:
    """Return the problem of the reward of an answer that ends an episode, "" if the job can use it."""
    if answer.reward is None or not answer.terminated:
        return ""
    try:
        parts = total_reward(answer.reward, answer.reward_weights or {})[0] if isinstance(answer.reward, dict) else {}
    except RolloutConfigError as error:
        return f"env.type: {error}"
    if spec.algorithm.name == "gdpo" and len(parts) < 2:
        return (
            f"algorithm.name: gdpo needs at least two rewards by name, got {', '.join(parts) or 'one reward without a name'}; have the "
            'environment give them, as {"reward": 1.5, "parts": {"right": 1.0, "short": 0.5}} for a completion, or use grpo for one'
        )
    return ""


def _failed(failures: Mapping[str, str], source: EnvSettings) -> Iterator[str]:
    field = "env.reward" if "reward" in source.options else "env.type"
    for message, place in list(failures.items())[:SHOWN]:
        yield f"{field}: called with {place}: {' '.join(message.split())}"


def _located(problem: str, spec: RLJobSpec) -> str:
    """Return the problem prefixed with the path of its field."""
    field = "env.reward" if spec.env.reward is not None else "env.type"
    return (
        f"spec.{problem}" if problem.startswith(("env.", "extensions:", "algorithm.")) else f"spec.{field}: {problem}"
    )
