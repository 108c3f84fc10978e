"""CEL rules: the API server checks with them what a `@rule` method checks in Python.

Each is written beside its method, and the generator of the CRD collects them.

Notation in an expression: `$name` or `$block.name` is a field with the model's default filled in. A field without a default, or whose
default is null, is written `self.name` and guarded by `has(self.name)`. Messages take values by format, because the API server's cost
estimate refuses to concatenate strings. A test sends a violation of every rule to a real API server and to pydantic.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_camel


@dataclass(frozen=True, kw_only=True, slots=True)
class Cel:
    """One CEL rule, which corresponds to one message of a `@rule` method."""

    holds: str
    """Expression that is true for a valid object."""
    refusal: str
    """The message, with %s and %d for `values`."""
    values: tuple[str, ...] = ()
    """Expressions of the values in the message."""
    field: str | None = None
    """Field below the object to which the error points; None = the object."""


def literal(value: Any) -> str:
    """Return a Python value as a CEL literal."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps(value)


def exactly_one_given(what: str, names: tuple[str, ...]) -> Cel:
    """Return the rule that exactly one of the optional fields `names` is given."""
    aliases = [to_camel(name) for name in names]
    num_given = f"[{', '.join(f'has(self.{alias})' for alias in aliases)}].filter(given, given).size()"
    return Cel(
        holds=f"{num_given} == 1",
        refusal=f"{what} must have exactly one of {', '.join(aliases)}, got %d; give one",
        values=(num_given,),
    )


def no_keys(field: str, taken: str, refusal: str) -> Cel:
    """Return the rule that the map `field` has no keys `k` for which the expression `taken` holds."""
    return Cel(
        holds=f"!has(self.{field}) || !self.{field}.exists(k, {taken})",
        refusal=refusal,
        values=(f"self.{field}.filter(k, {taken})",),
        field=field,
    )


def unique(field: str, key: str) -> Cel:
    """Return the rule that no two entries of the list `field` have the same `key`."""
    is_unique = f"self.{field}.exists_one(other, other.{key} == one.{key})"
    return Cel(
        holds=f"!has(self.{field}) || self.{field}.all(one, {is_unique})",
        refusal=f"{field} must have unique {key}s, got %s more than once; change one",
        values=(f"self.{field}.filter(one, !{is_unique})[0].{key}",),
        field=field,
    )
