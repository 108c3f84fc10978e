"""Errors of the schema in the words of the project: `path: rule, got value, what to do`, with the name that a misspelled one is meant to be.

`RLJob` uses it for every job, from YAML or from Python. The errors stay a `pydantic.ValidationError`; their texts are replaced.
"""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rl_core.api.field_hints import as_list, meant_field, suggest, theirs
from rl_core.api.foreign_names import foreign_value
from rl_core.api.similar import nearest

QUOTED = re.compile(r"'([^']*)'")


def explained(error: ValidationError, root: type[BaseModel], *, at: tuple[str, ...] = ()) -> ValidationError:
    """Return `error` of the schema `root`, or of its part at the path `at`, with texts that say the rule, the value and the way out.

    The types and places of its parts stay. A part that holds several broken rules of a block becomes one for each rule. That a required
    field is missing is left out where its misspelled name is reported.
    """
    details = error.errors(include_url=False)
    for detail in details:
        detail["loc"] = (*at, *detail["loc"])
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    misspelled = {(*loc[:-1], meant_field(root, loc)) for loc in unknown}
    misspelled |= {place[:end] for place in map(theirs, unknown) for end in range(2, len(place) + 1)}
    parts = [
        InitErrorDetails(
            type=PydanticCustomError(detail["type"], text),
            loc=detail["loc"],
            input=detail["input"],
        )
        for detail in details
        if detail["type"] != "missing" or detail["loc"] not in misspelled
        for text in _texts(detail, root)
    ]
    return ValidationError.from_exception_data(error.title, parts)


def problem_lines(error: ValidationError) -> list[str]:
    """Return one line, `path: text`, for each problem in a validation error. The error must come from `explained`."""
    return [
        f"{'.'.join(map(str, detail['loc'])) or 'job'}: {detail['msg']}" for detail in error.errors(include_url=False)
    ]


def _texts(detail: ErrorDetails, root: type[BaseModel]) -> Iterator[str]:
    if detail["type"] == "value_error":
        yield from str(detail["msg"]).removeprefix("Value error, ").splitlines()
    else:
        yield _text(detail, root)


def _text(detail: ErrorDetails, root: type[BaseModel]) -> str:
    shown, kind = _show(detail["input"]), detail["type"]
    if kind == "extra_forbidden":
        return f"is not a known field, got {shown}, {suggest(root, detail['loc'], detail['input'])}"
    if kind == "missing":
        return "must be given, got nothing, add it"
    if kind == "model_type":
        # The example is a mapping of the only field that is required.
        example = as_list(root, detail["loc"], detail["input"]).strip("[]")
        return f"must be a mapping of fields, got {shown}, " + (
            f"write {example}" if example else "indent its fields below it"
        )
    rule = str(detail["msg"]).replace("Input should be", "must be").replace("should have", "must have")
    return f"{rule[0].lower() + rule[1:]}, got {shown}, {_way_out(detail, root)}"


def _way_out(detail: ErrorDetails, root: type[BaseModel]) -> str:
    kind, path = detail["type"], ".".join(str(part) for part in detail["loc"][1:])
    if own_name := foreign_value(path, detail["input"]):
        return own_name
    if kind == "list_type" and (example := as_list(root, detail["loc"], detail["input"])):
        return f"write {example}, and with --set in quotes: --set '{path}={example}'"
    if kind in ("literal_error", "enum"):
        meant = nearest(str(detail["input"]), QUOTED.findall(detail["msg"]))
        return f"did you mean {meant}?" if meant else "choose one of these"
    if kind.endswith(("_type", "_parsing")):
        return "write a value of that type"
    if detail["input"] == -1 and kind.startswith("greater_than"):
        return "change the value; if -1 is meant to switch it off, docs/reference/rljob.md says how"
    return "change the value"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
