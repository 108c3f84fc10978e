"""The registry of advantages, losses and rewards by name. Imports no torch.

Built-ins are held as `module:function` text and imported when first resolved; a built-in estimator or loss is a plain function
of tensors, whose parameters are filled from the fields of the inputs that have their name. Users add their own with `register`,
or write `package.module:function` where a job asks for a name. Calling conventions by kind:

- advantage: `fn(inputs: AdvantageInputs, **options) -> AdvantageResult`
- loss: `fn(inputs: LossInputs, **options) -> LossResult`
- reward: `fn(prompts, completions, **columns) -> list[float | None]`
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, TypeVar

from rl_core.api.similar import did_you_mean
from rl_core.api.user_code import import_function

F = TypeVar("F", bound=Callable[..., Any])

INPUTS = {
    "advantage": "rl_core.algorithms.advantages.types:AdvantageInputs",
    "loss": "rl_core.algorithms.losses.types:LossInputs",
}
"""Kind -> the dataclass its functions are called with; a kind that is not here is called as its functions are written."""


@dataclass(frozen=True, slots=True)
class _Builtin:
    """A plain function below `rl_core.algorithms` and how it is called with inputs."""

    path: str
    """`module:function`."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Parameters that the name sets for good."""
    nullable: frozenset[str] = frozenset()
    """Parameters without a default that may be None in the inputs."""


_BUILTIN: dict[str, dict[str, _Builtin]] = {
    "advantage": {
        "grpo": _Builtin("advantages.group_relative:grpo_advantages"),
        "dr_grpo": _Builtin("advantages.group_relative:grpo_advantages", fixed=(("scale", "none"),)),
        "rloo": _Builtin("advantages.group_relative:rloo_advantages"),
        "raw": _Builtin("advantages.group_relative:raw_advantages"),
        "reinforce_plus_plus": _Builtin("advantages.reinforce:reinforce_plus_plus_advantages"),
        "reinforce_plus_plus_baseline": _Builtin(
            "advantages.reinforce:reinforce_plus_plus_advantages", fixed=(("baseline", "group_mean"),)
        ),
        "gae": _Builtin("advantages.gae:gae_advantages", nullable=frozenset({"values"})),
        "embodied_gae": _Builtin("advantages.embodied:embodied_gae_advantages"),
        "gdpo": _Builtin("advantages.gdpo:gdpo_advantages"),
        "opd": _Builtin("advantages.distillation:opd_advantages"),
        "distill": _Builtin("advantages.distillation:distill_advantages"),
    },
    "loss": {
        "ppo_clip": _Builtin("losses.policy:ppo_clip_loss"),
        "cispo": _Builtin("losses.policy:cispo_loss"),
        "gspo": _Builtin("losses.policy:gspo_loss"),
        "reinforce": _Builtin("losses.policy:reinforce_loss"),
        "opd": _Builtin("losses.policy:reinforce_loss"),
        "decoupled_ppo": _Builtin("losses.decoupled:decoupled_ppo_loss"),
    },
    "reward": {
        "math": _Builtin("rewards:math_rewards"),
        "exact": _Builtin("rewards:exact_rewards"),
        "format": _Builtin("rewards:format_rewards"),
    },
}
_BUILTIN_ALIASES: dict[str, dict[str, str]] = {
    "advantage": {"reinforce++": "reinforce_plus_plus", "reinpp": "reinforce_plus_plus", "ppo": "gae"},
    "loss": {"actor": "ppo_clip", "actor_critic": "ppo_clip", "decoupled_actor_critic": "decoupled_ppo"},
    "reward": {},
}

_known: dict[str, dict[str, _Builtin | Callable[..., Any]]] = {
    kind: dict(functions) for kind, functions in _BUILTIN.items()
}
_aliases: dict[str, dict[str, str]] = {kind: dict(functions) for kind, functions in _BUILTIN_ALIASES.items()}


def register(kind: str, name: str, *, aliases: Iterable[str] = (), overwrite: bool = False) -> Callable[[F], F]:
    """Return a decorator that makes a function known as `name` (and `aliases`) of `kind`.

    Raises ValueError for an unknown kind, a name with a colon, or a taken name without `overwrite`.
    """
    table = _table(kind)
    spellings = [_normal(spelling) for spelling in (name, *aliases)]
    for spelling in spellings:
        if ":" in spelling:
            raise ValueError(f"a registered {kind} must have no ':' in its name, got {spelling!r}; use a plain name")
        if not overwrite and (spelling in table or spelling in _aliases[kind]):
            raise ValueError(f"{kind} {spelling!r} is already registered; choose another name or pass overwrite=True")

    def keep(function: F) -> F:
        canonical, *alternatives = spellings
        for spelling in spellings:
            _aliases[kind].pop(spelling, None)
        table[canonical] = function
        for spelling in alternatives:
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
        return import_function(name, field=f"{kind} function")
    canonical = _normal(name)
    canonical = _aliases[kind].get(canonical, canonical)
    if canonical not in table:
        known = names(kind)
        raise ValueError(
            f"{kind} must be one of {', '.join(known)} or a 'package.module:function', got {name!r}{_with_colon(name) or did_you_mean(name, known)}"
        )
    function = table[canonical]
    return _load(kind, function) if isinstance(function, _Builtin) else function


def _with_colon(name: str) -> str:
    """Return ` (did you mean MODULE:FUNCTION?)` for a name of the form MODULE.FUNCTION, else ""."""
    module, _, function = name.rpartition(".")
    return (
        f" (did you mean {module}:{function}?)"
        if module.replace(".", "_").isidentifier() and function.isidentifier()
        else ""
    )


def builtin(kind: str, name: str) -> Callable[..., Any]:
    """Return the built-in function `name`, also where a registered one has taken its name. Raises KeyError for any other."""
    return _load(kind, _BUILTIN[kind][name])


def names(kind: str) -> tuple[str, ...]:
    """Return the known names of `kind` without aliases, sorted; ValueError for an unknown kind."""
    return tuple(sorted(_table(kind)))


@functools.lru_cache(maxsize=256)
def option_names(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the option names of a resolved function of inputs, and whether it takes any further ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named), takes_any


def require_options(kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError naming the options that the resolved `function` does not take."""
    accepted, takes_any = option_names(function)
    unknown = sorted(set(options) - accepted)
    if unknown and not takes_any:
        known = ", ".join(sorted(accepted)) or "none"
        raise ValueError(f"{kind} {name!r} must get known options ({known}), got {', '.join(unknown)}; remove them")


@functools.cache
def _load(kind: str, builtin: _Builtin) -> Callable[..., Any]:
    """Return a built-in function in the convention of its kind, the same object each time."""
    function: Callable[..., Any] = _import(f"rl_core.algorithms.{builtin.path}")
    if kind not in INPUTS:
        return function
    return _of_inputs(function, _import(INPUTS[kind]), fixed=dict(builtin.fixed), nullable=builtin.nullable)


def _import(path: str) -> Any:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)


def _of_inputs(
    function: Callable[..., Any], inputs_type: type, *, fixed: Mapping[str, Any], nullable: frozenset[str]
) -> Callable[..., Any]:
    """Return `function` as `fn(inputs, **options)`.

    Parameters named like a field of the dataclass `inputs_type` are filled from it, those in `fixed` are set for good
    and the others stay options. A field that `function` needs (no default, not in `nullable`) and that is None in
    `inputs` is a ValueError naming it.
    """
    parameters = inspect.signature(function).parameters
    filled = [field.name for field in fields(inputs_type) if field.name in parameters and field.name not in fixed]
    needed = {name for name in filled if parameters[name].default is inspect.Parameter.empty} - nullable

    @functools.wraps(function)
    def of_inputs(inputs: Any, **options: Any) -> Any:
        arguments = {name: getattr(inputs, name) for name in filled}
        missing = sorted(name for name in needed if arguments[name] is None)
        if missing:
            raise ValueError(
                f"{function.__name__} needs {', '.join(missing)} in {inputs_type.__name__}, got None; fill it"
            )
        return function(**arguments, **fixed, **options)

    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in filled and name not in fixed
    ]
    inputs_parameter = inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=inputs_type)
    of_inputs.__signature__ = inspect.Signature([inputs_parameter, *options])  # type: ignore[attr-defined]
    return of_inputs


def _table(kind: str) -> dict[str, _Builtin | Callable[..., Any]]:
    if kind not in _known:
        raise ValueError(f"kind must be one of {', '.join(sorted(_known))}, got {kind!r}")
    return _known[kind]


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")
