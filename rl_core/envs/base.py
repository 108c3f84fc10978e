"""The parts that all environments share: the interface, the base of configuration models, and helpers that build an `EnvironmentReturn`.

Built-in environments return `rewards` and `terminateds` as torch tensors (float32, bool, shape [B]) in a process that has imported torch,
and as numpy arrays of the same type in others, so that env processes never import torch. Rewards that contain None are a list; None means
that no reward applies to the sample, which is then masked, that is, left out of the loss.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from rl_core.api.base import Spec
from rl_core.api.errors import ConfigError
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.rewards import EXPLANATION

__all__ = [
    "EnvConfig",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Log",
    "bool_array",
    "float_array",
    "last_assistant_text",
    "parse_config",
    "prompt_text",
    "single_turn_return",
]

Log = Sequence[Mapping[str, Any]]
"""One message log; only `role` and `content` are read."""

Model = TypeVar("Model", bound=Spec)


class EnvConfig(Spec):
    """Base of the configuration models of environments: camelCase in YAML, unknown fields are errors."""


def parse_config(model: type[Model], cfg: Any, *, where: str = "env.options") -> Model:
    """Return `cfg` (an instance, a mapping or None) as `model`.

    Raises ConfigError with one line `field: rule, got value` per problem.
    """
    if isinstance(cfg, model):
        return cfg
    try:
        return model.model_validate({} if cfg is None else dict(cfg))
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, model, where))) from error


def _problems(error: ValidationError, model: type[Spec], path_prefix: str) -> list[str]:
    fields = ", ".join(sorted(field.alias or name for name, field in model.model_fields.items()))
    problems = []
    for item in error.errors(include_url=False):
        path = ".".join([path_prefix, *map(str, item["loc"])])
        if item["type"] == "extra_forbidden":
            problems.append(f"{path}: unknown field, got {item['input']!r}; known fields are {fields or 'none'}")
        elif item["type"] == "missing":
            problems.append(f"{path}: is required, got nothing; add it")
        else:
            problems.append(f"{path}: {item['msg']}, got {item['input']!r}; correct it")
    return problems


def last_assistant_text(log: Log) -> str:
    """Return the content of the last assistant message, "" if there is none."""
    return next((str(message["content"]) for message in reversed(log) if message["role"] == "assistant"), "")


def prompt_text(log: Log) -> str:
    """Return the contents before the first assistant message, joined by newlines."""
    texts: list[str] = []
    for message in log:
        if message["role"] == "assistant":
            break
        texts.append(str(message["content"]))
    return "\n".join(texts)


def float_array(values: Sequence[float]) -> Any:
    """Return `values` as float32 [B]: a torch tensor if torch is imported, else a numpy array."""
    if "torch" in sys.modules:
        return sys.modules["torch"].tensor(list(values), dtype=sys.modules["torch"].float32)
    return np.asarray(values, dtype=np.float32)


def bool_array(values: Sequence[bool]) -> Any:
    """Return `values` as bool [B]: a torch tensor if torch is imported, else a numpy array."""
    if "torch" in sys.modules:
        return sys.modules["torch"].tensor(list(values), dtype=sys.modules["torch"].bool)
    return np.asarray(values, dtype=np.bool_)


def single_turn_return(
    rewards: Sequence[float | None] | Mapping[str, Sequence[float | None]],
    metadata: Sequence[dict[str, Any] | None],
    answers: list[str | None] | None = None,
    explanations: Sequence[str | None] = (),
) -> EnvironmentReturn:
    """Return the result of a single-turn environment: empty observations, no stop strings, all episodes terminated.

    `rewards` are one per row, or one list per name. `explanations`, one per row or none, say why a row got its reward.
    """
    if any(text is not None for text in explanations):
        pairs = zip(metadata, explanations, strict=True)
        metadata = [row if text is None else {**(row or {}), EXPLANATION: text} for row, text in pairs]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": ""} for _ in metadata],
        metadata=list(metadata),
        next_stop_strings=None,
        rewards={name: _reward_column(values) for name, values in rewards.items()}
        if isinstance(rewards, Mapping)
        else _reward_column(rewards),
        terminateds=bool_array([True] * len(metadata)),
        answers=answers,
    )


def _reward_column(rewards: Sequence[float | None]) -> Any:
    scored = [reward for reward in rewards if reward is not None]
    return float_array(scored) if len(scored) == len(rewards) else list(rewards)
