"""Environments by name and user code by `module:object`. Imports of user code happen in env child processes only."""

import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rl_core.api.errors import ConfigError, text_of
from rl_core.api.records import EnvironmentInterface

Env = TypeVar("Env", bound=type)
RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> list[float | None], sync or async."""

BUILT_IN = {
    "math": "rl_core.envs.math:MathEnvironment",
    "reasoning_gym": "rl_core.envs.reasoning_gym:ReasoningGymEnvironment",
    "reward": "rl_core.envs.reward:RewardEnvironment",
}
"""Imported on first use: each may need a package of the `env` extra."""

_registered: dict[str, type] = {}


def register_env(name: str) -> Callable[[Env], Env]:
    """Return a class decorator that makes an environment known as `name` (in `env.type`).

    The module must be listed in `spec.extensions`, so that env processes import it. A taken name raises ValueError.
    """

    def add(cls: Env) -> Env:
        taken = _registered.get(name)
        if name in BUILT_IN or (taken is not None and taken.__qualname__ != cls.__qualname__):
            raise ValueError(f"environment name must be free, got {name!r}, which is taken; choose another")
        _registered[name] = cls
        return cls

    return add


def known_envs() -> list[str]:
    """Return the names `env.type` accepts besides `module:Class`."""
    return sorted({*BUILT_IN, *_registered})


def make_env(name: str, cfg: Any = None) -> EnvironmentInterface:
    """Return the environment `name` (registered, or `module:Class`) built with `cfg`.

    A registered class gets `cfg` as it is and checks it with its configuration model. A user class gets the options as
    one mapping, or as an instance of its `config_model` when it has one; a class without `__init__` takes no options.
    Raises ConfigError for user code that cannot be imported or built, ValueError for an unknown name.
    """
    cls = _registered.get(name)
    if cls is None and name in BUILT_IN:
        cls = import_reference(BUILT_IN[name], field="env.type")
    if cls is None and ":" in name:
        return _make_user_env(name, {} if cfg is None else cfg)
    if cls is None:
        raise ConfigError(
            f"env.type: must be one of {', '.join(known_envs())} or module:Class, got {name!r}; "
            "correct it, or list the module that registers it in spec.extensions"
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
    plain = "__init__" not in {name for base in cls.__mro__[:-1] for name in vars(base)}
    if plain and options:
        raise ConfigError(
            f"env.options: {reference} takes no options, got {sorted(options)}; remove them or give it __init__(self, options)"
        )
    try:
        env: EnvironmentInterface = cls() if plain else cls(options)
    except Exception as error:  # user code may raise anything
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
    function = import_reference(reference, field="env.reward")
    if not callable(function):
        raise ConfigError(f"env.reward: must name a function, got {reference!r}, which is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _registered_reward(name: str) -> RewardFunction:
    from rl_core.algorithms.registry import resolve

    try:
        return resolve("reward", name)
    except ValueError as error:
        raise ConfigError(f"env.reward: {error}") from error


def load_extensions(modules: Sequence[str]) -> None:
    """Import `spec.extensions` and call their `register()` where they have one. Raises ConfigError."""
    for name in modules:
        register = getattr(_import(name, field="extensions"), "register", None)
        if callable(register):
            register()


def import_reference(reference: str, *, field: str) -> Any:
    """Return the object `module:name` (dots in `name` step into it).

    Raises ConfigError naming `field`, the cause with the line of user code it came from, and what the module defines.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{field}: must have the form module:name, got {reference!r}; correct it")
    target: Any = _import(module_name, field=field)
    for part in path.split("."):
        if not hasattr(target, part):
            found = sorted(name for name, value in vars(target).items() if callable(value) and not name.startswith("_"))
            names = ", ".join(found) or "nothing that can be called"
            raise ConfigError(
                f"{field}: must exist, got {reference!r}: {module_name} has no {part!r}; it defines {names}"
            )
        target = getattr(target, part)
    return target


def _import(name: str, *, field: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{field}: must be importable, got {name!r}, which was not found; put {name.partition('.')[0]}.py beside "
                "the job file or install its package"
            ) from error
        raise ConfigError(
            f"{field}: must be importable, got {name!r}: {describe(error)}; install what it needs"
        ) from error
    except BaseException as error:  # the import runs user code, which may even exit
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{field}: must be importable, got {name!r}: {describe(error)}; correct the module"
        ) from error


def describe(error: BaseException) -> str:
    """Return type, text and the last line of code of `error`, as `ValueError: no digits (score.py:7 in score)`."""
    message = " ".join(text_of(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({last.filename.rpartition('/')[2]}:{last.lineno} in {last.name})"
