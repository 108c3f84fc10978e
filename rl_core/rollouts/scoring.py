"""Environment steps for a batch of samples: one call per task, results in the order of rows, rewards checked."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.api.errors import RolloutDataFailure
from rl_core.api.records import EnvironmentReturn
from rl_core.api.rewards import total_reward
from rl_core.rollouts.environment import RemoteEnvironment


async def calculate_rewards(batch: Mapping[str, Any], task_to_env: Mapping[str, Any]) -> EnvironmentReturn:
    """Run one environment step for each row of `batch` and return the environments' answers in the order of rows.

    The name is NeMo-RL's; the result contains observations, metadata, stop strings and ends of episodes as well as rewards. `batch` has the
    keys `message_log`, `task_name` and `extra_env_info`. `step` is called once per distinct task name, concurrently. Rewards are a float32
    tensor [B], a dict of such tensors by name, or a list if a row has None (no reward applies). Raises ValueError for an unknown task,
    AssertionError if some tasks return rewards by name and others do not, and RolloutDataFailure if an environment returns a wrong number
    of rows.
    """
    names = list(batch["task_name"])
    rows_of: dict[Any, list[int]] = {}
    for index, name in enumerate(names):
        rows_of.setdefault(name, []).append(index)
    unknown = [name for name in rows_of if name not in task_to_env]
    if unknown:
        raise ValueError(
            f"task_name must be one of {sorted(map(str, task_to_env))}, got {unknown[0]!r}; add its environment"
        )
    if not names:
        return EnvironmentReturn([], [], [], torch.zeros(0), torch.zeros(0, dtype=torch.bool), [])
    steps = [_step(name, task_to_env[name], batch, rows) for name, rows in rows_of.items()]
    results = await _all(steps)
    if len(results) == 1:
        return _normalise(results[0])
    return _merge(results, list(rows_of.values()), len(names))


async def _all(steps: list[Any]) -> list[EnvironmentReturn]:
    """Return all results; raises the first failure after every step has ended."""
    if len(steps) == 1:
        return [await steps[0]]
    results: list[Any] = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _step(name: Any, env: Any, batch: Mapping[str, Any], rows: Sequence[int]) -> EnvironmentReturn:
    logs = [
        [{"role": message["role"], "content": message["content"]} for message in batch["message_log"][row]]
        for row in rows
    ]
    infos = batch.get("extra_env_info")
    metadata = [None if infos is None else infos[row] for row in rows]
    if isinstance(env, RemoteEnvironment):
        keys = [batch["sample_key"][row] for row in rows] if "sample_key" in batch else None
        result = await env.step(logs, metadata, keys=keys, task_names=[name] * len(rows))
    elif inspect.iscoroutinefunction(env.step):
        result = await env.step(logs, metadata)
    else:
        result = await asyncio.to_thread(_call_step, env, logs, metadata)
        if inspect.isawaitable(result):
            result = await result
    result = EnvironmentReturn(*result)
    _check_rows(name, result, len(rows))
    return result


def _call_step(env: Any, logs: Any, metadata: Any) -> Any:
    """Return what `env.step` returns; a StopIteration becomes a RuntimeError, because an asyncio future cannot hold it."""
    try:
        return env.step(logs, metadata)
    except StopIteration as error:
        raise RuntimeError(f"{type(env).__name__}.step raised StopIteration") from error


def _check_rows(name: Any, result: EnvironmentReturn, rows: int) -> None:
    columns = result.rewards if isinstance(result.rewards, Mapping) else {"rewards": result.rewards}
    fields = {
        "observations": result.observations,
        "metadata": result.metadata,
        "terminateds": result.terminateds,
        "next_stop_strings": result.next_stop_strings,
        "answers": result.answers,
        **columns,
    }
    for field, values in fields.items():
        if values is not None and len(values) != rows:
            raise RolloutDataFailure(f"environment {name!r} must answer {rows} rows, got {len(values)} in {field}")


def _normalise(result: EnvironmentReturn) -> EnvironmentReturn:
    rows = len(result.observations)
    return EnvironmentReturn(
        observations=list(result.observations),
        metadata=list(result.metadata),
        next_stop_strings=_filled(result.next_stop_strings, rows),
        rewards=_map_columns(result.rewards, _floats),
        terminateds=torch.as_tensor(result.terminateds, dtype=torch.bool),
        answers=_filled(result.answers, rows),
    )


def _merge(results: Sequence[EnvironmentReturn], rows_of: Sequence[Sequence[int]], count: int) -> EnvironmentReturn:
    """Return the results of several tasks in the order of the batch."""
    parts = [_normalise(result) for result in results]
    kinds = {isinstance(part.rewards, Mapping) for part in parts}
    if len(kinds) > 1:
        raise AssertionError(
            "rewards of all tasks of a batch must be numbers or all maps by name, got both; align the environments"
        )

    def column(values: Sequence[Sequence[Any]]) -> list[Any]:
        merged: list[Any] = [None] * count
        for rows, part in zip(rows_of, values, strict=True):
            for row, value in zip(rows, part, strict=True):
                merged[row] = value
        return merged

    rewards: Any
    if kinds == {True}:
        names = dict.fromkeys(name for part in parts for name in part.rewards)
        blank = [[None] * len(rows) for rows in rows_of]
        columns = {n: [p.rewards.get(n, b) for p, b in zip(parts, blank, strict=True)] for n in names}
        rewards = {
            name: _floats(column([list(column_values) for column_values in values])) for name, values in columns.items()
        }
    else:
        rewards = _floats(column([list(part.rewards) for part in parts]))
    return EnvironmentReturn(
        observations=column([part.observations for part in parts]),
        metadata=column([part.metadata for part in parts]),
        next_stop_strings=column([part.next_stop_strings or [] for part in parts]),
        rewards=rewards,
        terminateds=torch.as_tensor(column([part.terminateds.tolist() for part in parts]), dtype=torch.bool),
        answers=column([part.answers or [] for part in parts]),
    )


def _filled(values: list[Any] | None, rows: int) -> list[Any]:
    return [None] * rows if values is None else list(values)


def _map_columns(rewards: Any, convert: Any) -> Any:
    if isinstance(rewards, Mapping):
        return {name: convert(values) for name, values in rewards.items()}
    return convert(rewards)


def _floats(values: Any) -> Any:
    """Return `values` as a float32 tensor [B], or as a list of floats and None if a row has None."""
    if isinstance(values, list) and any(value is None for value in values):
        return [None if value is None else float(value) for value in values]
    return torch.as_tensor(values, dtype=torch.float32)


def one_reward(rewards: Any, env: Any, where: str) -> tuple[dict[str, float], float | None]:
    """Return (reward components by name, reward) of the first row; the reward is None if it does not apply.

    Components become one reward as `total_reward` says, with the environment's `reward_weights`. Raises RolloutConfigError if a component
    has no weight, RolloutDataFailure for a reward that is not finite. `where` names the sample in errors.
    """
    if not isinstance(rewards, Mapping):
        return {}, _finite(rewards[0], "reward", where)
    rewards_by_name = {name: _finite(values[0], f"reward {name}", where) for name, values in rewards.items()}
    return total_reward(rewards_by_name, getattr(env, "reward_weights", None) or {})


def _finite(value: Any, label: str, location: str) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise RolloutDataFailure(
            f"{label} must be finite, got {number} for {location}; a failed score is an error, not a reward"
        )
    return number
