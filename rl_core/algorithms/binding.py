"""The registry's calling convention: `fn(inputs, **options)`, made from plain functions and checked before the call."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def from_inputs(
    function: Callable[..., Any], inputs_type: type, *, nullable: tuple[str, ...] = (), **fixed: Any
) -> Callable[..., Any]:
    """Return `function` as `fn(inputs, **options)`.

    Parameters named like a field of the dataclass `inputs_type` are filled from it, those in `fixed` are set for good
    and the others stay options. A field that `function` needs (no default, not in `nullable`) and that is None in
    `inputs` is a ValueError naming it.
    """
    parameters = inspect.signature(function).parameters
    fields_used = [field.name for field in fields(inputs_type) if field.name in parameters and field.name not in fixed]
    needed = {name for name in fields_used if parameters[name].default is inspect.Parameter.empty} - set(nullable)
    title = function.__name__

    @functools.wraps(function)
    def bound(inputs: Any, **options: Any) -> Any:
        given = {name: getattr(inputs, name) for name in fields_used}
        missing = sorted(name for name in needed if given[name] is None)
        if missing:
            raise ValueError(f"{title} needs {', '.join(missing)} in {inputs_type.__name__}, got None; fill it")
        return function(**given, **fixed, **options)

    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in fields_used and name not in fixed
    ]
    first = inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=inputs_type)
    bound.__signature__ = inspect.Signature([first, *options])  # type: ignore[attr-defined]
    return bound


def option_names(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the option names of a registered function and whether it takes any further ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named), anything


def require_options(kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError naming the options that the registered `function` does not take."""
    accepted, anything = option_names(function)
    unknown = sorted(set(options) - accepted)
    if unknown and not anything:
        known = ", ".join(sorted(accepted)) or "none"
        raise ValueError(f"{kind} {name!r} must get known options ({known}), got {', '.join(unknown)}; remove them")
