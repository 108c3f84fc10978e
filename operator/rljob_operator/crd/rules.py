"""CEL rules from the twins of the schema's `@rule` methods.

Notation in an expression: `$name` or `$block.name` is a field with the model's default filled in. A field without a default, or whose
default is null, is written `self.name` and guarded by `has(self.name)`. Messages take values by format, because the API server's cost
estimate refuses to concatenate strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Schema = dict[str, Any]
PATH = re.compile(r"\$([a-zA-Z]+(?:\.[a-zA-Z]+(?![a-zA-Z(]))*)")
"""A field in the notation above; a name with an opening bracket is a method of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """One CEL rule that says what one message of a `@rule` method says."""

    holds: str
    """Expression that is true for a good object."""
    refusal: str
    """The message, with %s and %d for `values`."""
    values: tuple[str, ...] = ()
    """Expressions of the values in the message."""
    field: str | None = None
    """Field the refusal points at, below the object; None = the object."""


def cel_rule(twin: Twin, model: type[BaseModel]) -> Schema:
    """Return the twin as an entry of x-kubernetes-validations on objects of `model`."""
    return rule_entry(
        holds=with_defaults(twin.holds, model),
        refusal=twin.refusal,
        values=tuple(with_defaults(value, model) for value in twin.values),
        field=twin.field,
    )


def rule_entry(*, holds: str, refusal: str, values: tuple[str, ...] = (), field: str | None = None) -> Schema:
    """Return one entry of x-kubernetes-validations; the field path is only there when one is named."""
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
    """Return the expression for a field below `root`, whose default stands in when it or a block above it is absent.

    Text and lists are chosen by `has`: the API server knows no bound for what `orValue` returns, and refuses the cost.
    Raises ValueError when the model has no such field or the field has no default.
    """
    field = field_at(path, model)
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        raise ValueError(f"{path} of {model.__name__} must have a default to be written with $; write self.{path}")
    if isinstance(default, bool | int | float):
        number = float(default) if field.annotation is float else default
        return f"{root}.?{path.replace('.', '.?')}.orValue({literal(number)})"
    return f"({there(path, root)} ? {root}.{path} : {literal(default)})"


def there(path: str, root: str) -> str:
    """Return the expression that a field and all blocks above it are given."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: depth + 1])})" for depth in range(len(parts)))


def field_at(path: str, model: type[BaseModel]) -> FieldInfo:
    """Return the field at a path of aliases. Raises ValueError when there is none."""
    block, _, rest = path.partition(".")
    for field in model.model_fields.values():
        if field.alias == block:
            inner: Any = field.annotation
            return field_at(rest, inner) if rest else field
    raise ValueError(f"{model.__name__} must have the field {path} named in a CEL rule, got no {block}; correct it")


def literal(value: Any) -> str:
    """Return a Python value as a CEL literal."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def rules_of(model: type[BaseModel]) -> Iterator[str]:
    """Yield `Class.method` for each `@rule` that objects of `model` are checked by."""
    for base in reversed(model.__mro__):
        for name, member in vars(base).items():
            if getattr(member, "is_rule", False):
                yield f"{base.__name__}.{name}"
