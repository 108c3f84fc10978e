"""Reads YAML as kubectl does: PyYAML reads `1e-4` as text, YAML 1.2 and Kubernetes read it as a number."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from rl_core.api.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which adds the keys of another mapping below those that are written."""


class Loader(yaml.SafeLoader):
    """The safe loader, which also accepts numbers in scientific notation without a dot, and refuses a key that a mapping has twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the mapping as it is written, before `<<` adds keys. Raises yaml.YAMLError for a repeated key, of which YAML would take
        the last value in silence.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in keys:
                    raise ComposerError(None, None, f"the key {key.value!r} twice in one mapping", key.start_mark)
                keys.add(key.value)
        return node


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_documents(text: str) -> list[Any]:
    """Return the documents of a YAML text that are not empty. Raises yaml.YAMLError."""
    return [document for document in yaml.load_all(text, Loader) if document is not None]


def read_documents(file: Path) -> list[Any]:
    """Return the documents of a job file that are not empty. Raises ConfigError naming the file and line."""
    if not file.is_file():
        raise ConfigError(f"the job file must exist, got {file}; check the path")
    try:
        return load_documents(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: must be valid YAML, got {_cause(error)}; correct the line or its indentation"
        ) from error


def _cause(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Return what is wrong with a YAML text and where, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    context, start = getattr(error, "context", None), getattr(error, "context_mark", None)
    around = (
        f" {context} of line {start.line + 1}" if context and start is not None else f" {context}" if context else ""
    )
    return f"{error.problem}{around} (line {mark.line + 1}, column {mark.column + 1})"  # type: ignore[union-attr]


def load_value(text: str) -> Any:
    """Return one value. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)
