"""The classes whose instances messages may contain, by their name on the wire.

`record` defines one; `register_record` adds an existing class.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type)


class _Registry:
    """Record types by wire name and back."""

    def __init__(self) -> None:
        self.by_name: dict[str, type] = {}
        self.by_type: dict[type, str] = {}
        self.fields: dict[type, tuple[str, ...] | None] = {}
        """Names of the fields of each class that are sent, looked up once because messages are encoded often. None: `wire_fields` returns them."""

    def add(self, cls: type, name: str) -> None:
        registered = self.by_name.get(name)
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(
                f"record name {name!r} is taken by {registered.__module__}.{registered.__qualname__}; pass another name"
            )
        self.by_name[name] = cls
        self.by_type[cls] = name
        self.fields[cls] = _fields(cls)


def _fields(cls: Any) -> tuple[str, ...] | None:
    if hasattr(cls, "wire_fields"):
        return None
    if hasattr(cls, "_fields"):
        return tuple(cls._fields)
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


REGISTRY = _Registry()
"""Filled at import, read by the codec."""


def register_record(cls: Class, name: str | None = None) -> Class:
    """Allow instances of `cls` in messages and return `cls`. Usable as a decorator. `name` defaults to the qualified name.

    `cls` must be a dataclass, a NamedTuple, or define `wire_fields(self) -> dict` and `from_wire(cls, fields)`. With a class attribute
    `wire_tolerant = True` the receiver ignores unknown fields. Raises TypeError for other classes and ValueError when the name belongs to
    another class.
    """
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or hasattr(cls, "wire_fields")):
        raise TypeError(
            f"{cls!r} cannot be a record; make it a dataclass, a NamedTuple or give it wire_fields and from_wire"
        )
    REGISTRY.add(cls, name or cls.__qualname__)
    return cls


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(cls: type[Any]) -> Any:
    """Make `cls` a frozen, keyword-only, slotted dataclass and register it under its qualified name."""
    return register_record(dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls))
