"""Bounded types of the job schema: every string, list and map has a limit, so that the API server can bound the cost of CEL rules.

Strings without a limit of their own have `STRING_LIMIT` (base.py). Regular expressions are written in the subset that Python's `re` and
Go's RE2 read alike, because both check them.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rl_core.api.similar import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A regular expression that the whole value must match, with the parts of its error message."""

    regex: str
    """The expression, without anchors."""
    rule: str
    """The rule, as a phrase after `must be`."""
    way_out: str
    """What the user can do about it."""
    names: tuple[str, ...] = ()
    """Names that match, of which the error about a misspelled one suggests the nearest."""
    recipes: tuple[tuple[str, str], ...] = ()
    """(name, hint) of names that users may expect but that are written in another way; the error shows the hint."""

    def check(self, value: str | int) -> str | int:
        """Return the value. Raises ValueError when it does not match."""
        if not re.fullmatch(self.regex, str(value), re.ASCII):
            recipe = dict(self.recipes).get(str(value).lower())
            hint = f" ({recipe})" if recipe else did_you_mean(str(value), self.names)
            raise ValueError(f"must be {self.rule}, got {value}; {self.way_out}{hint}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {
            "pattern": f"^({self.regex})$",
            "x-refusal": f"must be {self.rule}, got %s; {self.way_out}",
        }


FUNCTION = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""A function of the user: `package.module:function`."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of an object, container or volume."""
EnvMap = Annotated[dict[Annotated[str, Field(max_length=128)], str], Field(max_length=64)]
"""Environment variables."""
LabelMap = Annotated[
    dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]], Field(max_length=32)
]
"""Labels or a node selector."""
AnnotationMap = Annotated[dict[Annotated[str, Field(max_length=317)], str], Field(max_length=32)]
Quantity = Annotated[
    int | Annotated[str, Field(max_length=32)],
    Pattern(
        regex=r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?",
        rule="a quantity: a whole number or text such as 500m or 2Gi",
        way_out="write it so",
    ),
]
"""Amount of a resource."""
CheckpointStep = Annotated[
    int | Annotated[str, Field(max_length=16)],
    Pattern(regex="latest|best|[0-9]{1,15}", rule="latest, best or the number of a step", way_out="write one of them"),
]
"""Which checkpoint of a run."""
ResourceMap = Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=16)]
Seconds = Annotated[int, Field(ge=1, lt=2**31)]
Port = Annotated[int, Field(ge=1, le=65535)]
ShortName = Annotated[
    str,
    Field(max_length=63),
    Pattern(
        regex=r"[a-z0-9]([-a-z0-9]*[a-z0-9])?",
        rule="a DNS-1123 label (a-z, 0-9 and -, a letter or digit at both ends)",
        way_out="rename it",
    ),
]
"""Name inside a pod: of a volume, a claim, an init container."""


def none_for_zero(value: float | None) -> float | None:
    """Return None for 0, so that 0 also means "off" for a field whose default is not null: `kubectl apply` drops nulls."""
    return value or None


def listed(values: Iterable[str]) -> str:
    """Return a list of values as text, formatted as in the messages of the API server."""
    return json.dumps(list(values))
