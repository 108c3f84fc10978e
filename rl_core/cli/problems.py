"""All problems of a job, each as one line: `path: rule, got value, what to do`."""

import copy
from collections.abc import Iterable
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_core.api.job import RLJob
from rl_core.cli.field_hints import fields_at, suggest, take_snake_case

MAX_PASSES = 6
PLACEHOLDER = "placeholder"


def find_problems(document: Any) -> tuple[RLJob | None, list[str]]:
    """Return (job, []) for a valid document, else (None, problems).

    Cross-field rules are only checked by pydantic once their parts are right; so wrong parts are replaced by their defaults
    and the document is checked again, until nothing new is found.
    """
    attempt = copy.deepcopy(document)
    problems = dict.fromkeys(take_snake_case(attempt))
    for _ in range(MAX_PASSES):
        try:
            job = RLJob.model_validate(attempt)
            return (None if problems else job), list(problems)
        except ValidationError as error:
            details = error.errors(include_url=False)
        before = len(problems)
        problems.update(dict.fromkeys(line for detail in details for line in describe(detail)))
        whole = any(detail["loc"] == ("spec",) and detail["type"] == "value_error" for detail in details)
        if len(problems) == before or whole or not isinstance(attempt, dict):
            break
        _mend(attempt, details)
    return None, list(problems)


def describe(detail: ErrorDetails) -> list[str]:
    """Return the lines for one validation error: one line, or one for each broken rule of a block."""
    if detail["type"] == "value_error":
        path = ".".join(str(part) for part in detail["loc"]) or "job"
        return [f"{path}: {line}" for line in str(detail["msg"]).removeprefix("Value error, ").splitlines()]
    return [_describe_field(detail)]


def _describe_field(detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"]) or "job"
    got = _show(detail["input"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{path}: is not a known field, got {got}, {suggest(detail['loc'])}"
    if kind == "missing":
        return f"{path}: must be given, got nothing, add it"
    if kind == "model_type":
        return f"{path}: must be a mapping of fields, got {got}, indent its fields below it"
    rule = str(detail["msg"]).replace("Input should be", "must be").replace("should have", "must have")
    return f"{path}: {rule[0].lower() + rule[1:]}, got {got}, {_way_out(kind)}"


def _way_out(kind: str) -> str:
    if kind.endswith(("_type", "_parsing")):
        return "write a value of that type"
    if kind in ("literal_error", "enum"):
        return "choose one of these"
    return "change the value"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _mend(document: dict[str, Any], details: Iterable[ErrorDetails]) -> None:
    """Replace an invalid value by its default, or by a placeholder where it is required, so that the other fields can be checked."""
    for detail in details:
        *parents, last = detail["loc"] or ("",)
        holder: Any = document
        for part in parents:
            holder = holder[part] if isinstance(holder, dict) and part in holder else None
        if not isinstance(holder, dict):
            continue
        if detail["type"] == "missing":
            holder[cast(str, last)] = REQUIRED.get(detail["loc"], {} if fields_at(detail["loc"]) else PLACEHOLDER)
        elif detail["loc"] in REQUIRED:
            holder[cast(str, last)] = copy.deepcopy(REQUIRED[detail["loc"]])
        elif detail["type"] == "string_type":
            holder[cast(str, last)] = PLACEHOLDER  # a rule of several fields would complain that it is not given
        else:
            holder.pop(last, None)


REQUIRED: dict[tuple[int | str, ...], Any] = {
    ("apiVersion",): "rljob.dev/v1alpha1",
    ("kind",): "RLJob",
    ("metadata", "name"): PLACEHOLDER,
    ("spec", "model", "path"): PLACEHOLDER,
    ("spec", "data"): {"train": PLACEHOLDER},
    ("spec", "data", "train"): PLACEHOLDER,
}
