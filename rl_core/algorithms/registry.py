"""Names of advantages, losses and rewards, and the functions behind them. Imports no torch.

Built-ins are held as `module:attribute` text and imported when first resolved. Users add their own with `register`, or
write `package.module:function` where a job asks for a name. Calling conventions by kind:

- advantage: `fn(inputs: AdvantageInputs, **options) -> AdvantageResult`
- loss: `fn(inputs: LossInputs, **options) -> LossResult`
- reward: `fn(prompts, completions, **columns) -> list[float | None]`
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeVar

from rl_core.api.errors import ConfigError
from rl_core.api.user_code import import_reference

F = TypeVar("F", bound=Callable[..., Any])

_ADVANTAGES = "rl_core.algorithms.advantages.registered"
_LOSSES = "rl_core.algorithms.losses.registered"
_REWARDS = "rl_core.algorithms.rewards"

_BUILTIN: dict[str, dict[str, str]] = {
    "advantage": {
        "grpo": f"{_ADVANTAGES}:grpo",
        "dr_grpo": f"{_ADVANTAGES}:dr_grpo",
        "rloo": f"{_ADVANTAGES}:rloo",
        "reinforce_plus_plus": f"{_ADVANTAGES}:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
        "gae": f"{_ADVANTAGES}:gae",
        "embodied_gae": f"{_ADVANTAGES}:embodied_gae",
        "gdpo": f"{_ADVANTAGES}:gdpo",
        "opd": f"{_ADVANTAGES}:opd",
        "raw": f"{_ADVANTAGES}:raw",
    },
    "loss": {
        "ppo_clip": f"{_LOSSES}:ppo_clip",
        "cispo": f"{_LOSSES}:cispo",
        "gspo": f"{_LOSSES}:gspo",
        "reinforce": f"{_LOSSES}:reinforce",
        "decoupled_ppo": f"{_LOSSES}:decoupled_ppo",
        "opd": f"{_LOSSES}:reinforce",
    },
    "reward": {
        "math": f"{_REWARDS}:math_rewards",
        "exact": f"{_REWARDS}:exact_rewards",
        "format": f"{_REWARDS}:format_rewards",
    },
}
_BUILTIN_ALIASES: dict[str, dict[str, str]] = {
    "advantage": {"reinforce++": "reinforce_plus_plus", "reinpp": "reinforce_plus_plus", "ppo": "gae"},
    "loss": {"actor": "ppo_clip", "actor_critic": "ppo_clip", "decoupled_actor_critic": "decoupled_ppo"},
    "reward": {},
}

_known: dict[str, dict[str, str | Callable[..., Any]]] = {kind: dict(found) for kind, found in _BUILTIN.items()}
_aliases: dict[str, dict[str, str]] = {kind: dict(found) for kind, found in _BUILTIN_ALIASES.items()}


def register(kind: str, name: str, *, aliases: Iterable[str] = (), overwrite: bool = False) -> Callable[[F], F]:
    """Return a decorator that makes a function known as `name` (and `aliases`) of `kind`.

    Raises ValueError for an unknown kind, a name with a colon, or a taken name without `overwrite`.
    """
    table = _table(kind)
    wanted = [_normal(spelling) for spelling in (name, *aliases)]
    for spelling in wanted:
        if ":" in spelling:
            raise ValueError(f"a registered {kind} must have no ':' in its name, got {spelling!r}; use a plain name")
        if not overwrite and (spelling in table or spelling in _aliases[kind]):
            raise ValueError(f"{kind} {spelling!r} is already registered; choose another name or pass overwrite=True")

    def keep(function: F) -> F:
        canonical, *others = wanted
        for spelling in wanted:
            _aliases[kind].pop(spelling, None)
        table[canonical] = function
        for spelling in others:
            table.pop(spelling, None)
            _aliases[kind][spelling] = canonical
        return function

    return keep


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """Return the function called `name`, importing it when needed; `package.module:function` names a user's own.

    Raises ValueError for an unknown kind or name (listing the known ones) and for an extension that cannot be imported.
    """
    table = _table(kind)
    if ":" in name:
        return _extension(kind, name)
    canonical = _normal(name)
    canonical = _aliases[kind].get(canonical, canonical)
    if canonical not in table:
        raise ValueError(f"{kind} must be one of {', '.join(names(kind))} or a 'package.module:function', got {name!r}")
    found = table[canonical]
    if isinstance(found, str):
        module, attribute = found.split(":")
        found = table[canonical] = getattr(import_module(module), attribute)
    return found


def names(kind: str) -> tuple[str, ...]:
    """Return the known names of `kind` without aliases, sorted; ValueError for an unknown kind."""
    return tuple(sorted(_table(kind)))


def _table(kind: str) -> dict[str, str | Callable[..., Any]]:
    if kind not in _known:
        raise ValueError(f"kind must be one of {', '.join(sorted(_known))}, got {kind!r}")
    return _known[kind]


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _extension(kind: str, name: str) -> Callable[..., Any]:
    found = import_reference(name, field=f"{kind} function")
    if not callable(found):
        raise ConfigError(
            f"{kind} function: must be a function, got {name!r}, which is a {type(found).__name__}; correct it"
        )
    extension: Callable[..., Any] = found
    return extension
