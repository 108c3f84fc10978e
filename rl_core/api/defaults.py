"""The defaults of the schema as a table by class and field, so that a job keeps the defaults with which it was accepted.

An operator keeps the table beside each job (manifests/config.py). A
 later release, which may have another
default or an additional field, resolves
the job with the stored table: `model_validate(spec, context=defaults.context)`. A class or field that the table lacks takes the
default of the code, so a schema class that is renamed loses what was kept for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic_core import to_jsonable_python

from rl_core.api.base import DEFAULTS, Spec

Table = Mapping[str, Mapping[str, Any]]
"""Class -> field as in YAML -> its default in the short form, in which a schema object is the mapping of its fields that differ from
the class's own defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """The defaults of one version of the schema."""

    version: str
    """Digest of the table, which identifies the version of the schema."""
    text: str
    """The table as canonical JSON."""
    table: Table

    @property
    def context(self) -> dict[str, Any]:
        """Validation context with which missing fields get the defaults of this table."""
        return {DEFAULTS: self.table}


@cache
def present() -> Defaults:
    """Return the defaults of the schema of this release."""
    from rl_core.api.job import RLJobSpec

    table = {cls.__name__: dict(_of_code(cls)) for cls in _classes(RLJobSpec)}
    return read(json.dumps(table, sort_keys=True, separators=(",", ":")))


def version_of(text: str) -> str:
    """Return the schema version of a table given as text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(text: str) -> Defaults:
    """Return the defaults that `text` holds. Raises ValueError when it is not a table."""
    table = json.loads(text)
    if not isinstance(table, dict) or not all(isinstance(fields, dict) for fields in table.values()):
        raise ValueError(f"kept defaults must be a table of classes and fields, got {text[:80]!r}; this is a bug")
    return Defaults(version=version_of(text), text=text, table=table)


def short(spec: Spec, table: Table | None = None) -> dict[str, Any]:
    """Return the fields of `spec` that differ from the defaults of `table` (None: of the code). Equal jobs give equal results."""
    return dict(_short(spec, spec.model_dump(mode="json", by_alias=True), table or {}))


def _short(value: Any, dumped: Any, table: Table) -> Any:
    """Return `value` in the short form; `dumped` is the same as JSON."""
    if isinstance(value, Spec):
        default = {**_of_code(type(value)), **table.get(type(value).__name__, {})}
        names = {field.alias or name: name for name, field in type(value).model_fields.items()}
        forms = {key: _short(getattr(value, names[key]), inner, table) for key, inner in dumped.items()}
        return {key: form for key, form in forms.items() if key not in default or form != default[key]}
    if isinstance(value, list | tuple):
        return [_short(item, inner, table) for item, inner in zip(value, dumped, strict=True)]
    return dumped


@cache
def _of_code(cls: type[Spec]) -> Mapping[str, Any]:
    """Return the defaults that the code gives the fields of a class, in the short form."""
    defaults = {}
    for name, field in cls.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            defaults[field.alias or name] = _short(value, to_jsonable_python(value, by_alias=True), {})
    return defaults


def _classes(cls: type[Spec]) -> set[type[Spec]]:
    """Return `cls` and the schema classes of its fields, recursively."""
    classes: set[type[Spec]] = set()
    waiting = [cls]
    while waiting:
        spec_class = waiting.pop()
        if spec_class not in classes:
            classes.add(spec_class)
            waiting += [inner for field in spec_class.model_fields.values() for inner in _named_in(field.annotation)]
    return classes


def _named_in(annotation: Any) -> Iterator[type[Spec]]:
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for part in get_args(annotation):
        yield from _named_in(part)
