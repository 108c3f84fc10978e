"""Renders chat templates as transformers does: with the same Jinja environment, filters and variables. Imported at first use."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_core.api.errors import ConfigError


class GenerationTag(Extension):  # type: ignore[misc] # mypy does not look into jinja2
    """The tag `{% generation %}`, which marks assistant text; the text is rendered as if the tag were not there."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tag and its end."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def render(
    source: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> str:
    """Return the conversation rendered by `source`; `variables` are those of the template, such as eos_token. Raises ConfigError."""
    # Some templates test `tools is none` and others `tools is defined`; transformers always defines them.
    template_variables = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    try:
        return str(_compiled(source).render(messages=list(messages), **template_variables))
    except TemplateError as error:
        raise ConfigError(_error_text(str(error))) from error
    except Exception as error:  # expressions of a template raise as Python's do
        raise ConfigError(_error_text(f"{type(error).__name__}: {error}")) from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Return the template, compiled once for all prompts of a data set."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _error_text(cause: str) -> str:
    return f"chat template must render the prompt, got: {cause}; correct the row or data.chatTemplate"


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
