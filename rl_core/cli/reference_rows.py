"""The fields of a schema as rows: path, type with bounds, default, meaning. They are read from its JSON schema."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rl_core.api.descriptions import described_schema

Node = Mapping[str, Any]
MANY = 2**31
"""Upper bounds of at least this value only keep numbers in the range of machine integers and are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One field."""

    path: str
    type: str
    default: str
    meaning: str


def rows(model: type[BaseModel]) -> Iterator[Row]:
    """Yield the fields of a model, depth first; a block or a list of blocks is followed by its own fields."""
    schema = described_schema(model)
    yield from _fields(schema, schema.get("$defs", {}), "")


def _fields(block: Node, blocks: Mapping[str, Node], prefix: str) -> Iterator[Row]:
    required = block.get("required", ())
    for name, field in block["properties"].items():
        path, node = f"{prefix}{name}", _resolved(field, blocks)
        meaning = " ".join(field.get("description", node.get("description", "")).split())
        default = "required" if name in required else _default(field.get("default"))
        inner, suffix = _inner(node, blocks)
        if inner is None:
            yield Row(path=path, type=_type(node, blocks), default=default, meaning=meaning)
            continue
        if suffix or default in ("required", "`null`"):
            yield Row(path=path + suffix, type="list" if suffix else "block", default=default, meaning=meaning)
        yield from _fields(inner, blocks, f"{path}{suffix}.")


def _resolved(node: Node, blocks: Mapping[str, Node]) -> Node:
    """Return the schema node to which a reference points, or which an optional value has."""
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        return _resolved(options[0], blocks)
    return _resolved(blocks[node["$ref"].rpartition("/")[2]], blocks) if "$ref" in node else node


def _inner(node: Node, blocks: Mapping[str, Node]) -> tuple[Node | None, str]:
    """Return the block whose fields follow, and `[]` when it is an entry of a list."""
    if "properties" in node:
        return node, ""
    entry = _resolved(node["items"], blocks) if node.get("type") == "array" else {}
    return (entry, "[]") if "properties" in entry else (None, "")


def _default(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _type(node: Node, blocks: Mapping[str, Node]) -> str:
    """Return the type in words, with its bounds."""
    node = _resolved(node, blocks)
    if "anyOf" in node:
        return "quantity" if "quantity" in node.get("x-refusal", "") else "int or text"
    if "enum" in node or "const" in node:
        return " or ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    kind = node.get("type")
    if kind == "array":
        return f"list of {_type(node['items'], blocks)}"
    if kind == "object":
        values = node.get("additionalProperties")
        return f"map to {_type(values, blocks)}" if isinstance(values, Mapping) else "free"
    type_name = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}[str(kind)]
    return f"{type_name}{_bounds(node)}"


def _bounds(node: Node) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node and node[key] < MANY]
    return f" {', '.join(bounds)}" if bounds else ""
