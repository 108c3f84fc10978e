"""YAML as kubectl reads it: PyYAML takes `1e-4` for text, where YAML 1.2 and Kubernetes see a number."""

import re
from collections.abc import Iterator
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """The safe loader, with numbers in scientific notation that have no dot."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_documents(text: str) -> Iterator[Any]:
    """Yield the documents of a YAML text that are not empty. Raises yaml.YAMLError."""
    return (document for document in yaml.load_all(text, Loader) if document is not None)


def load_value(text: str) -> Any:
    """Return one value. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)
