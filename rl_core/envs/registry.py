"""Finds environments and reward functions by name or by `module:object`. User code is imported in env child processes only."""

from collections.abc import Callable
from typing import Any, TypeVar

from rl_core.api.errors import ConfigError
from rl_core.api.records import EnvironmentInterface
from rl_core.api.similar import did_you_mean
from rl_core.api.user_code import describe, import_function, import_reference

Env = TypeVar("Env", bound=type)
RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> list[float | None], sync or async."""

BUILT_IN = {
    "agent": "rl_core.envs.agent:AgentEnvironment",
    "environment_factory": "rl_core.envs.environment_factory:EnvironmentFactory",
    "gymnasium_text": "rl_core.envs.gymnasium_text:GymnasiumTextEnvironment",
    "math": "rl_core.envs.math:MathEnvironment",
    "nemo_gym": "rl_core.envs.nemo_gym:NemoGymPrograms",
    "reasoning_gym": "rl_core.envs.reasoning_gym:ReasoningGymEnvironment",
    "reward": "rl_core.envs.reward:RewardEnvironment",
    "reward_model": "rl_core.envs.member_scores:MemberScoresEnvironment",
}
"""Built-in environments, imported at first use because each may need a package of the `env` extra."""

_registered: dict[str, type] = {}


def register_env(name: str) -> Callable[[Env], Env]:
    """Return a class decorator that registers an environment as `name` for `env.type`.

    The module must be listed in `spec.extensions`, so that env processes import it. Raises ValueError if the name is taken.
    """

    def add(cls: Env) -> Env:
        previous = _registered.get(name)
        if name in BUILT_IN or (previous is not None and previous.__qualname__ != cls.__qualname__):
            raise ValueError(f"environment name must be free, got {name!r}, which is taken; choose another")
        _registered[name] = cls
        return cls

    return add


def known_envs() -> list[str]:
    """Return the names that `env.type` accepts in addition to `module:Class`."""
    return sorted({*BUILT_IN, *_registered})


def make_env(name: str, cfg: Any = None) -> EnvironmentInterface:
    """Return the environment `name` (registered, or `module:Class`) built with `cfg`.

    A registered class gets `cfg` unchanged and checks it with its configuration model. A user class gets the options as one mapping, or as
    an instance of its `config_model` if it has one; a class without `__init__` takes no options. Raises ConfigError for an unknown name, and
    for user code that cannot be imported or built.
    """
    cls = _registered.get(name)
    if cls is None and name in BUILT_IN:
        cls = import_reference(BUILT_IN[name], field="env.type")
    if cls is None and ":" in name:
        return _make_user_env(name, {} if cfg is None else cfg)
    if cls is None:
        raise ConfigError(
            f"env.type: must be one of {', '.join(known_envs())} or module:Class, got {name!r}; "
            f"correct it, or list the module that registers it in spec.extensions{did_you_mean(name, known_envs())}"
        )
    env: EnvironmentInterface = cls(cfg)
    return env


def _make_user_env(reference: str, options: Any) -> EnvironmentInterface:
    cls = import_reference(reference, field="env.type")
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        raise ConfigError(
            f"env.type: must name a class with a method step(message_log_batch, metadata_batch), got {cls!r}; "
            "subclass rl_core.envs.base.EnvironmentInterface"
        )
    model = getattr(cls, "config_model", None)
    if model is not None:
        from rl_core.envs.base import parse_config

        options = parse_config(model, options)
    takes_nothing = "__init__" not in {name for base in cls.__mro__[:-1] for name in vars(base)}
    if takes_nothing and options:
        raise ConfigError(
            f"env.options: {reference} takes no options, got {sorted(options)}; remove them or give it __init__(self, options)"
        )
    try:
        env: EnvironmentInterface = cls() if takes_nothing else cls(options)
    except Exception as error:  # User code may raise anything.
        raise ConfigError(
            f"env.type: {reference} could not be built: {describe(error)}; correct its __init__"
        ) from error
    return env


def load_reward(reference: str) -> RewardFunction:
    """Return the reward function `module:function`, or a registered one of `rl_core.algorithms.rewards`.

    Raises ConfigError when it cannot be imported or called.
    """
    if ":" not in reference:
        return _registered_reward(reference)
    return import_function(reference, field="env.reward")


def _registered_reward(name: str) -> RewardFunction:
    from rl_core.algorithms.registry import resolve

    try:
        return resolve("reward", name)
    except ValueError as error:
        raise ConfigError(f"env.reward: {error}") from error
