"""Entries of x-kubernetes-validations from the CEL of the schema's `@rule` methods (rl_core.api.cel), defaults filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl_core.api.cel import Cel, literal

Schema = dict[str, Any]
PATH = re.compile(r"\$([a-zA-Z]+(?:\.[a-zA-Z]+(?![a-zA-Z(]))*)")
"""A field reference `$path`; a name before an opening bracket is a method call."""


def cel_rule(cel: Cel, model: type[BaseModel]) -> Schema:
    """Return the rule as an entry of x-kubernetes-validations on objects of `model`."""
    return rule_entry(
        holds=with_defaults(cel.holds, model),
        refusal=cel.refusal,
        values=tuple(with_defaults(value, model) for value in cel.values),
        field=cel.field,
    )


def rule_entry(*, holds: str, refusal: str, values: tuple[str, ...] = (), field: str | None = None) -> Schema:
    """Return one entry of x-kubernetes-validations; it has a field path only if `field` is given."""
    entry = {"rule": holds}
    if values:
        entry["messageExpression"] = f"{literal(refusal)}.format([{', '.join(values)}])"
    else:
        entry["message"] = refusal
    return entry | ({"fieldPath": f".{field}"} if field else {})


def with_defaults(expression: str, model: type[BaseModel]) -> str:
    """Return the expression with each `$path` replaced by the field and its default."""
    return PATH.sub(lambda match: field_or_default(match[1], model), expression)


def field_or_default(path: str, model: type[BaseModel], *, root: str = "self") -> str:
    """Return the CEL expression for a field below `root`, or its default if the field or a block above it is absent.

    For text and lists it uses `has`, because the API server cannot bound the cost of `orValue` for them. Raises ValueError if the model has
    no such field or the field has no default.
    """
    field = field_at(path, model)
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        raise ValueError(f"{path} of {model.__name__} must have a default to be written with $; write self.{path}")
    if isinstance(default, bool | int | float):
        number = float(default) if field.annotation is float else default
        return f"{root}.?{path.replace('.', '.?')}.orValue({literal(number)})"
    return f"({presence_expression(path, root)} ? {root}.{path} : {literal(default)})"


def presence_expression(path: str, root: str) -> str:
    """Return the CEL expression that a field and all blocks above it are set.

    Without `&&`, which kubectl's annotation escapes to 12 characters.
    """
    block, *names = path.split(".")
    return f"{root}.?{'.?'.join((block, *names))}.hasValue()" if names else f"has({root}.{block})"


def field_at(path: str, model: type[BaseModel]) -> FieldInfo:
    """Return the field at a path of aliases. Raises ValueError when there is none."""
    block, _, rest = path.partition(".")
    for field in model.model_fields.values():
        if field.alias == block:
            annotation: Any = field.annotation
            return field_at(rest, annotation) if rest else field
    raise ValueError(f"{model.__name__} must have the field {path} named in a CEL rule, got no {block}; correct it")


def rules_of(model: type[BaseModel]) -> Iterator[tuple[str, tuple[Cel, ...]]]:
    """Yield (`Class.method`, its CEL) for each `@rule` that objects of `model` are checked by."""
    for base in reversed(model.__mro__):
        for name, member in vars(base).items():
            if hasattr(member, "cel"):
                yield f"{base.__name__}.{name}", member.cel
