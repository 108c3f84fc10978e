"""All problems of a job, each as one line: `path: rule, got value, what to do`."""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_core.api.field_hints import fields_at, is_required, meant_field, take_snake_case, theirs
from rl_core.api.job import RLJob
from rl_core.api.problems import problem_lines

MAX_PASSES = 6
PLACEHOLDER = "placeholder"


def find_problems(document: Any) -> tuple[RLJob | None, list[str]]:
    """Return (job, []) for a valid document, else (None, problems).

    Pydantic checks rules over several fields only when each field is valid. Invalid parts are therefore replaced by their defaults, and the
    document is checked again until nothing new is found. A rule that names a replaced value is not reported: it would quote the default.
    """
    attempt = copy.deepcopy(document)
    problems = dict.fromkeys(take_snake_case(RLJob, attempt))
    replaced: list[re.Pattern[str]] = []
    for _ in range(MAX_PASSES):
        try:
            job = RLJob.model_validate(attempt)
            return (None if problems else job), list(problems)
        except ValidationError as error:
            lines, details = problem_lines(error), error.errors(include_url=False)
        lines = [line for line in lines if not (_is_about(line, replaced) or _quotes_placeholder(line))]
        num_before = len(problems)
        problems.update(dict.fromkeys(lines))
        spec_failed = any(detail["loc"] == ("spec",) and detail["type"] == "value_error" for detail in details)
        if len(problems) == num_before or spec_failed or not isinstance(attempt, dict):
            break
        replaced += [_mention(path) for detail in details for path in _given(attempt, detail["loc"])]
        _mend(attempt, details)
    return None, list(problems)


def _is_about(line: str, parts: Iterable[re.Pattern[str]]) -> bool:
    """Return whether a problem is a rule over several fields of `spec` that mentions one of `parts` before its way out."""
    return line.startswith("spec: ") and any(part.search(line.rpartition("; ")[0] or line) for part in parts)


def _quotes_placeholder(line: str) -> bool:
    """Return whether a problem is about a value that stands for an invalid one."""
    return f" {PLACEHOLDER};" in line


def _mention(path: Sequence[int | str]) -> re.Pattern[str]:
    """Return a pattern for a mention of a field below `spec` in the text of a rule."""
    return re.compile(rf"(?<![\w.]){re.escape('.'.join(map(str, path)))}(?![\w.])")


def _given(document: Any, place: Sequence[int | str]) -> Iterator[tuple[int | str, ...]]:
    """Yield the paths below `spec` of the values that a document gives at a place and in the block there."""
    if len(place) < 2 or place[0] != "spec":
        return
    value = document
    for part in place:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        for name in value:
            yield from _given(document, (*place, name))
    else:
        yield tuple(place[1:])


def _mend(document: dict[str, Any], details: Iterable[ErrorDetails]) -> None:
    """Replace an invalid value by its default, or by a placeholder where it is required, so that the other fields can be checked."""
    for detail in details:
        *parents, key = detail["loc"] or ("",)
        holder: Any = document
        for part in parents:
            holder = holder[part] if isinstance(holder, dict) and part in holder else None
        if not isinstance(holder, dict):
            continue
        if detail["type"] == "missing":
            block = fields_at(RLJob, detail["loc"])
            holder[cast(str, key)] = REQUIRED.get(detail["loc"], {} if block else PLACEHOLDER)
        elif detail["loc"] in REQUIRED:
            holder[cast(str, key)] = copy.deepcopy(REQUIRED[detail["loc"]])
        elif detail["type"] == "extra_forbidden":
            value = holder.pop(key, None)
            _give_what_is_meant(document, detail["loc"])
            meant = (*parents, meant_field(RLJob, detail["loc"]))
            if is_required(RLJob, meant):
                # The value is kept where its content can be checked too.
                keeps_value = isinstance(value, dict) or not fields_at(RLJob, meant)
                holder.setdefault(cast(str, meant[-1]), value if keeps_value else copy.deepcopy(REQUIRED.get(meant)))
        elif detail["type"] == "string_type":
            holder[cast(str, key)] = PLACEHOLDER  # a rule of several fields would complain that it is not given
        else:
            holder.pop(key, None)


def _give_what_is_meant(document: dict[str, Any], place: tuple[int | str, ...]) -> None:
    """Put a placeholder where a required setting belongs that is at `place` by its name in another library."""
    meant, holder = theirs(place), document
    if meant not in REQUIRED:
        return
    for part in meant[:-1]:
        holder = holder.setdefault(cast(str, part), {}) if isinstance(holder, dict) else {}
    holder.setdefault(cast(str, meant[-1]), copy.deepcopy(REQUIRED[meant]))


REQUIRED: dict[tuple[int | str, ...], Any] = {
    ("apiVersion",): "rljob.dev/v1alpha1",
    ("kind",): "RLJob",
    ("metadata", "name"): PLACEHOLDER,
    ("spec", "model"): {"path": PLACEHOLDER},
    ("spec", "model", "path"): PLACEHOLDER,
    ("spec", "data"): {"train": PLACEHOLDER},
    ("spec", "data", "train"): PLACEHOLDER,
}
