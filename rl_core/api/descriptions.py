"""The docstrings of fields as descriptions. They are read from the source only when a page or the CRD is generated."""

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of `model` that has one, inherited fields included."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            texts |= _own(cls)
    return {name: text for name, text in texts.items() if name in model.model_fields}


def described_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of `model` by aliases, with the docstrings of fields as descriptions."""
    return model.model_json_schema(by_alias=True, schema_generator=_WithDescriptions)


class _WithDescriptions(GenerateJsonSchema):
    """Adds the descriptions to the properties of each model."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Return the JSON schema of one model."""
        result, model = super().model_schema(schema), schema["cls"]
        for name, text in descriptions(model).items():
            result["properties"][model.model_fields[name].alias or name].setdefault("description", text)
        return result


def _own(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the attributes that the body of `cls` itself defines."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        attribute.target.id: inspect.cleandoc(text.value.value)
        for attribute, text in pairwise(definition.body)
        if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
