"""The generated definition: committed as generated, structural, bounded, and with CEL for each rule of the schema."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rl_core.api.base import Spec, rule
from rl_core.api.cel import Cel, literal
from rl_core.api.job import MUTABLE_FIELDS, OPERATOR_FIELDS, RLJobSpec
from rl_core.api.pods import PodSpec
from rljob_operator.crd.__main__ import PATHS
from rljob_operator.crd.document import COLUMNS, document, render, validations_of
from rljob_operator.crd.freeze import FREE, QUOTED, frozen_fields
from rljob_operator.crd.rules import cel_rule, field_at
from rljob_operator.crd.structural import structural

ROOT = Path(__file__).parents[3]
SCHEMA = document()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
POD_FIELDS = {field.alias for field in PodSpec.model_fields.values()}
YAML_1_1_BOOLEANS = {"n", "y", "on", "off", "no", "yes"}


def nodes(schema, path=""):
    """Yield (path, node) of a structural schema."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for name, inner in (("[]", schema.get("items")), (".*", schema.get("additionalProperties"))):
        if inner is not None:
            yield from nodes(inner, path + name)


def spec_nodes():
    return [(path, node) for path, node in nodes(SCHEMA) if path.startswith((".spec", ".status"))]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_committed_file_is_what_the_schema_generates(path):
    assert (ROOT / path).read_text() == render()


def test_plain_client_side_apply_can_hold_the_definition_in_its_annotation():
    """kubectl writes compact JSON in which `<`, `>` and `&` take 6 characters; all annotations of an object have 256 KiB, others of them 3 %."""
    text = json.dumps(yaml.safe_load(render()), separators=(",", ":"))
    assert len(text) + 5 * sum(map(text.count, "<>&")) < 256 * 1024 * 0.97


def test_every_field_has_words_for_kubectl_explain():
    silent = {path for path, node in spec_nodes() if not node.get("description") and path[-1] not in "]*"}
    described_elsewhere = {  # below a field that actor has too, or that Kubernetes documents for pods
        path
        for path in silent
        if path.count(".") > 3
        and (path.startswith((".spec.rollout.", ".spec.env.")) or re.split(r"[.\[]", path)[3] in POD_FIELDS)
    }
    words = {path: node.get("description") for path, node in spec_nodes()}
    assert silent == described_elsewhere
    fields = {re.split(r"[.\[]", path)[3] for path in described_elsewhere}
    assert all(words[f".spec.actor.{field}"] for field in fields)


def test_every_node_is_typed_and_no_keyword_is_one_that_kubernetes_refuses():
    allowed = {
        "type",
        "description",
        "properties",
        "required",
        "items",
        "additionalProperties",
        "enum",
        "format",
        "default",
    }
    allowed |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems"}
    allowed |= {"maxItems", "minProperties", "maxProperties", "nullable"}
    for path, node in nodes(SCHEMA):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert {key for key in node if not key.startswith("x-kubernetes-")} <= allowed, path


def test_every_string_list_and_map_is_bounded_and_every_list_says_how_it_merges():
    for path, node in spec_nodes():
        kind = node.get("type")
        if kind == "string":
            assert "maxLength" in node or "enum" in node, path
        if kind == "array":
            assert "maxItems" in node and node["x-kubernetes-list-type"] in ("atomic", "map"), path
        if kind == "object" and "properties" not in node:
            assert "maxProperties" in node, path
        if kind == "integer" and "enum" not in node:
            assert node["format"] in ("int32", "int64") and node["maximum"] < 2**53, path


def test_no_property_is_a_boolean_of_yaml_1_1():
    assert not {path for path, _ in nodes(SCHEMA) if path.rpartition(".")[2] in YAML_1_1_BOOLEANS}


def test_the_only_defaults_are_those_of_the_scale_subresource():
    assert [path for path, node in nodes(SCHEMA) if "default" in node] == [".spec.rollout", ".spec.rollout.replicas"]


def test_each_column_and_path_is_a_field_of_the_schema():
    paths = dict(nodes(SCHEMA)) | {".metadata.creationTimestamp": {"type": "string"}}
    kinds = {"date": "string"}
    for name, kind, path, _ in COLUMNS:
        assert paths[path]["type"] == kinds.get(kind, kind), name
    scale = document()["spec"]["versions"][0]["subresources"]["scale"]
    assert {*scale.values()} <= {*paths}


def test_a_rule_without_cel_stops_the_generator():
    class Lonely(Spec):
        size: int = 0

        @rule()
        def _even(self):
            if self.size % 2:
                yield "size must be even"

    with pytest.raises(ValueError, match=r"must have CEL, got none for Lonely._even"):
        validations_of(Lonely)


def test_a_field_without_a_bound_stops_the_generator():
    class Unbounded(Spec):
        names: list[str] = []

    with pytest.raises(ValueError, match=r"Unbounded.names: must have maxItems"):
        structural(Unbounded, validations=lambda name: [])


def test_fixed_fields_and_free_fields_together_are_the_spec():
    frozen = set(frozen_fields())
    assert set(QUOTED) <= frozen
    for path in (*MUTABLE_FIELDS, *OPERATOR_FIELDS):
        assert field_at(path, RLJobSpec) is not None
    for name in (field.alias for field in RLJobSpec.model_fields.values()):
        assert any(path.split(".")[0] == name for path in (*frozen, *FREE)), name
    assert not {path for path in frozen for free in FREE if path == free or path.startswith(f"{free}.")}


def test_a_field_in_a_rule_gets_its_default_and_its_guard():
    class Inner(Spec):
        size: int = 3
        name: str = "it's"

    class Outer(Spec):
        inner: Inner = Inner()

    cel = Cel(holds="$inner.size > 0 && $inner.name.size() > 0", refusal="got %s", values=("$inner.size",))
    assert cel_rule(cel, Outer) == {
        "rule": "self.?inner.?size.orValue(3) > 0 && "
        r"(self.?inner.?name.hasValue() ? self.inner.name : 'it\'s').size() > 0",
        "messageExpression": "'got %s'.format([self.?inner.?size.orValue(3)])",
    }
    with pytest.raises(
        ValueError, match="Outer must have the field inner.colour named in a CEL rule, got no inner|got no colour"
    ):
        cel_rule(Cel(holds="$inner.colour", refusal=""), Outer)


@pytest.mark.parametrize(
    ("value", "text"), [("a'b\\", r"'a\'b\\'"), (1.0, "1.0"), (True, "true"), (["a", "b'"], r"['a', 'b\'']")]
)
def test_literals_are_those_of_cel(value, text):
    assert literal(value) == text
