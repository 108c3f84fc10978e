"""The format of a part of the schema that is sent to a process of another release: all fields, and which differ from their default.

A reader whose schema lacks a field ignores it if it has its default, because the feature is then off, and refuses it by name otherwise. A
reader whose schema has an additional field uses the default of its own code.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rl_core.api.base import Spec
from rl_core.api.defaults import Table, short
from rl_core.api.errors import ConfigError

CHANGED = "changed"
"""Key of the list of fields that differ from their default."""
Part = TypeVar("Part", bound=Spec)


def write(part: Spec, table: Table | None = None) -> dict[str, Any]:
    """Return `part` as a document for another version; `table` holds the defaults with which it was resolved, None = those of the code."""
    return {**part.model_dump(mode="json", by_alias=True), CHANGED: short(part, table)}


def text(part: Spec) -> str:
    """Return the document as JSON."""
    return json.dumps(write(part))


def read(schema: type[Part], document: Mapping[str, Any] | str | bytes) -> Part:
    """Return the part that `write` wrote, perhaps in another version.

    Raises ConfigError naming each field that this version lacks and that does not hold its default; ValidationError for what else
    is wrong.
    """
    content = json.loads(document if isinstance(document, str | bytes) else json.dumps(document))
    changed = content.pop(CHANGED, content) if isinstance(content, dict) else content
    try:
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        unknown = [detail["loc"] for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    if not unknown:
        # No field can be left out, so this raises the same error again.
        return schema.model_validate_json(json.dumps(content))
    refused = [loc for loc in unknown if holds(changed, loc)]
    if refused:
        fields = ", ".join(f"{'.'.join(map(str, loc))}: {at(changed, loc)!r}" for loc in refused)
        raise ConfigError(
            f"the {schema.__name__} must hold fields that this version knows, or their defaults, got {fields}; remove them, or use an "
            "image of the release that wrote it"
        )
    for loc in unknown:
        at(content, loc[:-1]).pop(loc[-1], None)
    return schema.model_validate_json(json.dumps(content))


def holds(tree: Any, path: Sequence[str | int]) -> bool:
    """Return whether `tree` has a value at `path`."""
    try:
        at(tree, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def at(tree: Any, path: Sequence[str | int]) -> Any:
    """Return the value of `tree` at `path`. Raises KeyError, IndexError or TypeError when there is none."""
    for part in path:
        tree = tree[part]
    return tree
