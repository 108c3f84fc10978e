"""Converts a pydantic model to a structural schema of Kubernetes: without references, each node typed, each list and map bounded.

Patterns and names of maps become CEL rules, because their error messages can name the rule, the value and the remedy. The schema contains
no defaults except that of the scale subresource's path: the operator fills in defaults and stores the resolved job in its ConfigMap, while
the object keeps what the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import BaseModel

from rl_core.api.base import STRING_LIMIT
from rl_core.api.cel import literal
from rl_core.api.descriptions import described_schema
from rl_core.api.groups import GroupSpec
from rl_core.api.pods import PodSpec
from rljob_operator.crd.rules import Schema, rule_entry

Validations = Callable[[str], list[Schema]]
"""From the name of a model class to the CEL rules of its objects."""

COPIED = (
    "description",
    "minimum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "enum",
)
LIST_KEYS = {
    "Volume": ["name"],
    "InitContainer": ["name"],
    "ResourceClaim": ["name"],
    "EnvValueFrom": ["name"],
    "Condition": ["type"],
    "RoleStatus": ["name"],
    "GroupSpec": ["name"],
    "DeviceStatus": ["pod"],
    "Metric": ["name"],
    "PodEnds": ["name"],
    "Draining": ["pod"],
}
"""Key fields of the lists that are maps by meaning; a key makes an entry unique. Other lists are replaced as a whole."""


FREE_FIELDS: Mapping[str, frozenset[str]] = {
    GroupSpec.__name__: frozenset(field.alias or name for name, field in PodSpec.model_fields.items())
}
"""Fields of a model that the definition leaves to the operator, which refuses wrong ones with the words of the schema.

The pod fields of a role take 50 KB; written a fourth time, they would not fit into the annotation in which kubectl keeps the definition.
"""


def structural(model: type[BaseModel], *, validations: Validations) -> Schema:
    """Return the structural schema of `model`.

    Raises ValueError for a part of the model that a structural schema cannot hold, or that has no bound.
    """
    schema = described_schema(model)
    return _Converter(schema.get("$defs", {}), validations).convert(schema, model.__name__)


class _Converter:
    """Turns one JSON schema with its definitions into a structural schema."""

    def __init__(self, definitions: Mapping[str, Schema], validations: Validations) -> None:
        self._definitions = definitions
        self._validations = validations

    def convert(self, node: Schema, path: str) -> Schema:
        """Return `node` in structural form; `path` is for error messages."""
        node = self._resolved(node)
        if "anyOf" in node:
            return self._union(node, path)
        if "const" in node:
            node = node | {"enum": [node["const"]]}
        kind = node.get("type")
        if kind == "object":
            return self._object(node, path)
        if kind == "array":
            return self._list(node, path)
        if kind == "string":
            return self._string(node, path)
        if kind in ("integer", "number"):
            return self._number(node, path)
        if kind == "boolean":
            return {"type": "boolean"} | _copied(node)
        raise ValueError(
            f"{path}: every node must have a type that Kubernetes knows, got {node}; give the field a type"
        )

    def _resolved(self, node: Schema) -> Schema:
        """Return the node with its reference replaced. A description beside the reference replaces that of the class."""
        if "$ref" not in node:
            return node
        name = node["$ref"].rpartition("/")[2]
        return self._resolved(self._definitions[name] | {key: node[key] for key in node if key != "$ref"})

    def _union(self, node: Schema, path: str) -> Schema:
        variants = [variant for variant in node["anyOf"] if variant.get("type") != "null"]
        if len(variants) == 1:
            result = self.convert(variants[0] | _copied(node), path)
            if len(variants) < len(node["anyOf"]) and node.get("default") is not None:
                result["nullable"] = True
            return result
        if {variant.get("type") for variant in variants} == {"integer", "string"}:
            text = next(variant for variant in variants if variant["type"] == "string")
            result = {"x-kubernetes-int-or-string": True} | _copied(node) | {"maxLength": text["maxLength"]}
            return result | _matching(node, "string(self)")
        raise ValueError(f"{path}: a union must be of an integer and a string, got {node}; split the field")

    def _object(self, node: Schema, path: str) -> Schema:
        result: Schema = {"type": "object"} | _copied(node)
        if "properties" in node:
            if free := FREE_FIELDS.get(node["title"]):
                node = node | {
                    "properties": {name: schema for name, schema in node["properties"].items() if name not in free}
                }
                result["x-kubernetes-preserve-unknown-fields"] = True
            result["properties"] = {
                name: self.convert(inner, f"{path}.{name}") for name, inner in node["properties"].items()
            }
            if node.get("required"):
                result["required"] = node["required"]
            rules = self._validations(node["title"])
            return result | ({"x-kubernetes-validations": rules} if rules else {})
        _need(node, "maxProperties", path)
        if node.get("additionalProperties") in (True, None):
            return result | {"x-kubernetes-preserve-unknown-fields": True}
        return result | {"additionalProperties": self.convert(node["additionalProperties"], f"{path}.*")}

    def _list(self, node: Schema, path: str) -> Schema:
        _need(node, "maxItems", path)
        item = self._resolved(node["items"])
        result = {"type": "array"} | _copied(node) | {"items": self.convert(item, f"{path}[]")}
        keys = LIST_KEYS.get(item.get("title", ""))
        return result | ({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys} if keys else ATOMIC)

    def _string(self, node: Schema, path: str) -> Schema:
        result: Schema = {"type": "string"} | _copied(node)
        if "enum" not in node:
            result.setdefault("maxLength", STRING_LIMIT)
        return result | _matching(node, "self")

    def _number(self, node: Schema, path: str) -> Schema:
        result: Schema = {"type": node["type"]} | _copied(node)
        is_integer = node["type"] == "integer"
        for exclusive, inclusive, step in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
            if exclusive in node:
                result[inclusive] = node[exclusive] + step if is_integer else node[exclusive]
                if not is_integer:
                    result[exclusive] = True
        if "maximum" in node:
            result["maximum"] = node["maximum"]
        if is_integer and "enum" not in node:
            _need(result, "maximum", path)
            result["format"] = "int32" if result["maximum"] < 2**31 else "int64"
        return result if is_integer else result | {"format": "double"}


ATOMIC: Schema = {"x-kubernetes-list-type": "atomic"}


def _matching(node: Schema, text: str) -> Schema:
    """Return the CEL rule for a pattern; unlike `pattern`, it can have a message."""
    if "pattern" not in node:
        return {}
    return {
        "x-kubernetes-validations": [
            rule_entry(holds=f"{text}.matches({literal(node['pattern'])})", refusal=node["x-refusal"], values=("self",))
        ]
    }


def _copied(node: Schema) -> Schema:
    copied = {key: node[key] for key in COPIED if node.get(key) is not None}
    return copied | ({"description": _one_line(copied["description"])} if "description" in copied else {})


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _need(node: Schema, keyword: str, path: str) -> None:
    if keyword not in node:
        raise ValueError(
            f"{path}: must have {keyword} so that the API server can bound its cost, got none; bound the field"
        )
