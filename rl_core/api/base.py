"""The base of every schema class: camelCase in YAML, snake_case in Python, unknown fields are errors, frozen.

Rules over several fields are generators marked `@rule` with the CEL that says the same on the API server; all rules of a class are
checked together, so that a user sees every broken one at once.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel

from rl_core.api.cel import Cel

Rule = TypeVar("Rule", bound=Callable[[Any], Iterator[str]])
DEFAULTS = "defaults"
"""Key of the validation context under which `api/defaults.py` gives the defaults to resolve by."""
STRING_LIMIT = 4096
"""Longest string without a bound of its own, in characters."""


def rule(*cel: Cel) -> Callable[[Rule], Rule]:
    """Mark a method of a Spec that yields one message per violation (field, rule, value got, way out).

    `cel`: one CEL rule per message, in the same words. Without any the class cannot be part of the CRD.
    """

    def mark(function: Rule) -> Rule:
        function.cel = cel  # type: ignore[attr-defined]
        return function

    return mark


class Spec(BaseModel):
    """A part of the job schema; attribute docstrings become descriptions in the CRD and the reference, see `descriptions.py`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        str_max_length=STRING_LIMIT,
    )

    @model_validator(mode="before")
    @classmethod
    def _take_kept_defaults(cls, data: Any, info: ValidationInfo) -> Any:
        """Fill what is not given with the defaults of the context; a field that this code lacks is left out at its default."""
        stored = info.context.get(DEFAULTS, {}).get(cls.__name__) if isinstance(info.context, dict) else None
        if not stored or not isinstance(data, dict):
            return data
        names = {field.alias or name: name for name, field in cls.model_fields.items()}
        filled = {key: value for key, value in stored.items() if key in names and names[key] not in data}
        removed = {key for key, value in stored.items() if key not in names and data.get(key) == value}
        return {**filled, **{key: value for key, value in data.items() if key not in removed}}

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [message for check in _rules_of(type(self)) for message in check(self)]
        if broken:
            raise ValueError("\n".join(broken))
        return self


@functools.cache
def _rules_of(cls: type[Spec]) -> list[Callable[[Any], Iterator[str]]]:
    return [member for base in reversed(cls.__mro__) for member in vars(base).values() if hasattr(member, "cel")]
