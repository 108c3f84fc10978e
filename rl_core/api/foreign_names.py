"""The settings of other libraries under the names of this project, read from foreign_names.yaml: for hints and for docs/coming-from.md."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic.alias_generators import to_camel

LIBRARIES = ("TRL", "verl", "prime-rl", "OpenRLHF")
GUESSED = "guessed"
"""Key of names that no library has but people write."""
GENERIC = frozenset(
    {"name", "type", "path", "interval", "step", "dataset", "project", "rank", "alpha", "n"}
    | {"mode", "enable", "format", "device", "tool", "level", "debug", "args", "id", "model", "env", "host", "port"}
)
"""Last parts that mean something else in other blocks: they lead to a field of the block that they stand in, or nowhere."""


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A setting of other libraries and where it is set here, or that it has no counterpart here."""

    ours: str
    """Path below `spec`, or an option of `rljob`; "" if there is no counterpart."""
    names: Mapping[str, tuple[str, ...]]
    """Library -> what it calls the setting, in several versions. GUESSED stands for no library."""
    note: str = ""
    """What differs; without a counterpart, what happens here instead."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values of other libraries that are refused here -> what to do, as an instruction."""

    def is_called(self, name: str, *, alone: bool = False) -> bool:
        """Return whether a library calls the setting `name`, without the blocks around it, in snake_case or camelCase.

        `alone`: only names that have no blocks around them.
        """
        known_names = (known for names in self.names.values() for known in names if not (alone and "." in known))
        last_parts = (known.rpartition(".")[2] for known in known_names)
        return any(name in (last, to_camel(last)) for last in last_parts)


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Return all settings, in the order of the file."""
    from rl_core.api.text import load_value  # every process imports the schema, and few need the YAML library

    rows = load_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(
        ForeignName(
            row.get("ours", ""),
            {library: tuple(row[library]) for library in (*LIBRARIES, GUESSED) if library in row},
            row.get("note", ""),
            row.get("values", {}),
        )
        for row in rows
    )


def foreign_value(path: str, value: object) -> str:
    """Return what to do about a value of another library at `path` below spec, as an instruction; "" if none has it."""
    return next(
        (
            setting.values[str(value)]
            for setting in foreign_names()
            if setting.ours == path and str(value) in setting.values
        ),
        "",
    )


def is_foreign_block(name: str) -> bool:
    """Return whether another library has a block of settings called `name`."""
    return any(
        name in known.split(".")[:-1]
        for setting in foreign_names()
        for names in setting.names.values()
        for known in names
    )


def foreign_path(path: Sequence[str], *, whole: bool = False) -> ForeignName | None:
    """Return the setting that other libraries keep at `path`, blocks and name; None where none does.

    A name of a library matches when the path ends with all of its parts, or, unless it is GENERIC, with its last one. The longest match counts.
    `whole`: only names that match with a block, or that are the whole path.
    """
    match: ForeignName | None = None
    longest = 0
    for setting in foreign_names():
        for name in (name for names in setting.names.values() for name in names):
            parts = name.split(".")
            length = next((n for n in (len(parts), 1) if list(path[-n:]) == parts[-n:]), 0)
            complete = length == len(parts) and (length > 1 or length == len(path))
            if length > longest and (complete or not (whole or path[-1] in GENERIC)):
                match, longest = setting, length
    return match


def foreign_name(name: str, block: str) -> ForeignName | None:
    """Return the setting that other libraries call `name`, in snake_case or camelCase; None where none does.

    Of several settings the one in `block`, the path below spec at which the name was found, is preferred to the first.
    """
    settings = [setting for setting in foreign_names() if setting.is_called(name)]
    in_block = [setting for setting in settings if block and setting.ours.rpartition(".")[0] == block]
    return next(iter(in_block or (() if name in GENERIC else settings)), None)
