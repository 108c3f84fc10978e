"""Checks what an environment returned and splits it into one answer per row, as the env worker's RPC returns them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.api.errors import RolloutDataFailure, shown
from rl_core.envs.scores import check_scores, row_name
from rl_core.messages.envs import EnvAnswer

FIELDS = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")


def answers_of(
    result: Any, rows: int, *, what: str, reward_weights: Mapping[str, float] | None = None
) -> list[EnvAnswer]:
    """Return one answer per row from the `result` of an environment: an EnvironmentReturn, or a tuple of its six fields.

    `reward_weights` are added to rewards by name. Raises RolloutDataFailure that names `what`, the field and the row if a length, a type or
    a number is wrong.
    """
    observations, metadata, stops, rewards, terminateds, answers = _fields(result, what)
    columns: dict[str, list[Any]] = {
        "observation": [
            _observation(observation, row_name(what, row, rows))
            for row, observation in enumerate(_column(observations, rows, "observations", what))
        ],
        "metadata": [
            _metadata(value, row_name(what, row, rows))
            for row, value in enumerate(_column(metadata, rows, "metadata", what, optional=True))
        ],
        "stop_strings": [
            _stops(value, row_name(what, row, rows))
            for row, value in enumerate(_column(stops, rows, "next_stop_strings", what, optional=True))
        ],
        "reward": _rewards(rewards, rows, what),
        "terminated": [
            _flag(value, row_name(what, row, rows))
            for row, value in enumerate(_column(terminateds, rows, "terminateds", what))
        ],
        "answer": _column(answers, rows, "answers", what, optional=True),
    }
    if reward_weights is not None:
        weights = {str(name): float(weight) for name, weight in reward_weights.items()}
        columns["reward_weights"] = [weights if isinstance(reward, dict) else None for reward in columns["reward"]]
    return [EnvAnswer(**{name: column[row] for name, column in columns.items()}) for row in range(rows)]


def _fields(result: Any, label: str) -> Sequence[Any]:
    if all(hasattr(result, name) for name in FIELDS):
        return [getattr(result, name) for name in FIELDS]
    if isinstance(result, tuple | list) and len(result) == len(FIELDS):
        return result
    raise RolloutDataFailure(f"{label}: step must return an EnvironmentReturn, got {type(result).__name__}; return one")


def _column(values: Any, rows: int, name: str, label: str, *, optional: bool = False) -> list[Any]:
    if values is None and optional:
        return [None] * rows
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RolloutDataFailure(
            f"{label}: {name} must be a list of {rows}, got {type(values).__name__}; return one per row"
        )
    if len(values) != rows:
        raise RolloutDataFailure(
            f"{label}: {name} must have one entry per row ({rows}), got {len(values)}; return one per row"
        )
    return list(values)


def _observation(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str):
        return {"role": value["role"], "content": value["content"]}
    raise RolloutDataFailure(
        f"{place}: an observation must be {{role, content}} of text, got {shown(value)}; return that"
    )


def _metadata(value: Any, place: str) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    raise RolloutDataFailure(f"{place}: metadata must be a map or None, got {shown(value)}; return that")


def _flag(value: Any, place: str) -> bool:
    scalar = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(scalar, bool | int | float) and scalar in (0, 1):
        return bool(scalar)
    raise RolloutDataFailure(f"{place}: terminateds must be true or false, got {shown(value)}; return that")


def _stops(value: Any, place: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value):
        return list(value)
    raise RolloutDataFailure(
        f"{place}: next_stop_strings must be a list of texts that are not empty, or None, got {shown(value)}; return that"
    )


def _rewards(rewards: Any, rows: int, label: str) -> list[Any]:
    if not isinstance(rewards, Mapping):
        return list(check_scores(rewards, rows, what=f"{label}: rewards"))
    if not rewards:
        raise RolloutDataFailure(f"{label}: rewards by name must have a name, got none; return one list per name")
    columns = {
        str(name): check_scores(values, rows, what=f"{label}: rewards[{name!r}]") for name, values in rewards.items()
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]
