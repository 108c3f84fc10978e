"""The whole CustomResourceDefinition: schema, printer columns, subresources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from rl_core.api.base import Spec
from rl_core.api.job import API_VERSION, RLJobSpec
from rl_core.api.metadata import NAME_PATTERN, NAME_REFUSAL
from rl_core.api.pods import PodSpec
from rl_core.api.status import RLJobStatus
from rl_core.plan.groups import BUILT_IN, ROLLOUT
from rljob_operator.crd.freeze import transition_rules
from rljob_operator.crd.rules import Schema, cel_rule, rule_entry, rules_of
from rljob_operator.crd.structural import FREE_FIELDS, structural

GROUP, VERSION = API_VERSION.split("/")
HEADER = (
    "# Generated from rl_core.api by `python -m rljob_operator.crd`; edit the schema's docstrings and rules instead.\n"
)
COLUMNS = (
    # name, type, path, priority: 1 = only with -o wide
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.columns.step", 0),
    ("Reward", "number", ".status.reward", 0),
    ("Version", "integer", ".status.policyVersion", 0),
    ("Lag", "integer", ".status.lag", 0),
    ("Rollouts", "string", ".status.columns.rollouts", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Attempt", "integer", ".status.epoch", 1),
    ("Actor", "string", ".status.columns.actors", 1),
    ("Env", "string", ".status.columns.envs", 1),
    ("Checkpoint", "integer", ".status.checkpoint.lastStep", 1),
    ("Success", "string", ".status.columns.success", 1),
    ("Reason", "string", ".status.columns.reason", 1),
)


def render() -> str:
    """Return the definition as YAML."""
    return HEADER + yaml.dump(
        document(), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=1000, allow_unicode=False
    )


def document() -> Schema:
    """Return the definition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _object_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.rollout.replicas",
                "statusReplicasPath": ".status.rollout.replicas",
                "labelSelectorPath": ".status.rollout.selector",
            },
        },
        "selectableFields": [{"jsonPath": ".status.phase"}],
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"rljobs.{GROUP}", "labels": {"app.kubernetes.io/name": "rljob"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": "RLJob",
                "listKind": "RLJobList",
                "plural": "rljobs",
                "singular": "rljob",
                "shortNames": ["rlj"],
                "categories": ["rl"],
            },
            "versions": [version],
        },
    }


def _object_schema() -> Schema:
    spec = structural(RLJobSpec, validations=_validations)
    spec["x-kubernetes-validations"] += transition_rules()
    _describe_shared_parts_once(spec["properties"])
    spec["properties"][ROLLOUT]["default"] = {}
    spec["properties"][ROLLOUT]["properties"]["replicas"]["default"] = 1  # An autoscaler needs this path to exist.
    name = rule_entry(
        holds=f"self.metadata.name.matches('^{NAME_PATTERN.pattern}$')",
        refusal=NAME_REFUSAL,
        values=("self.metadata.name",),
    )
    return {
        "description": "A reinforcement-learning post-training run: actor, rollout and env pods that train a language model.",
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": [name],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(RLJobStatus, validations=_validations),
        },
    }


def _describe_shared_parts_once(fields: Schema) -> None:
    """Describe the fields of a pod without their inner fields, and refer to the first group for what another group shares with it.

    `kubectl explain pod.spec.volumes` explains the inner fields. All descriptions together would use a fifth of the annotation in which
    kubectl stores the definition.
    """
    first_group, *other_groups = BUILT_IN
    described = fields[first_group]["properties"]
    for group in other_groups:
        shared = {name: field for name, field in fields[group]["properties"].items() if field == described.get(name)}
        for name, field in shared.items():
            description = min(field["description"], f"As {first_group}.{name}.", key=len)
            fields[group]["properties"][name] = _without_words(field) | {"description": description}
    for name in (field.alias or name for name, field in PodSpec.model_fields.items()):
        described[name] = _without_words(described[name]) | {"description": described[name]["description"]}


def _without_words(node: Schema) -> Schema:
    schema = {key: value for key, value in node.items() if key != "description"}
    schema |= {key: _without_words(schema[key]) for key in ("items", "additionalProperties") if key in schema}
    if "properties" in schema:
        schema["properties"] = {name: _without_words(part) for name, part in schema["properties"].items()}
    return schema


def _validations(title: str) -> list[Schema]:
    return validations_of(_MODELS[title])


def validations_of(model: type[BaseModel]) -> list[Schema]:
    """Return the CEL rules on objects of a model. Raises ValueError when a `@rule` has no CEL."""
    rules = [(name, cel) for name, cel in rules_of(model) if _can_be_read(model, name)]
    if missing := [name for name, cel in rules if not cel]:
        raise ValueError(
            f"every @rule of the CRD must have CEL, got none for {', '.join(missing)}; write @rule(Cel(...))"
        )
    return [cel_rule(expression, model) for _, cel in rules for expression in cel]


def _can_be_read(model: type[BaseModel], rule: str) -> bool:
    """Return whether the API server can check a rule on objects of a model: not a rule on fields that the definition does not describe."""
    return model.__name__ not in FREE_FIELDS or rule.startswith(f"{model.__name__}.")


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


_MODELS = {model.__name__: model for model in _subclasses(Spec)}


class _Dumper(yaml.SafeDumper):
    """Writes YAML without anchors, and nested schemas inside a field of a role on one line: indentation would double the size."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no anchor is wanted."""
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """Return the node of a mapping, on one line when it is a schema without blocks of fields below it."""
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = "type" in mapping and not _has_blocks(mapping)
        return node


def _has_blocks(schema: Schema) -> bool:
    """Return whether a schema has properties that have properties."""
    return any("properties" in part for part in schema.get("properties", {}).values())
