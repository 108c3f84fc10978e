"""Hints for names of fields that a schema lacks: another library's name, snake_case, the nearest name at any depth.

`root` is the class of the whole document, RLJob; it is an argument because that class uses these hints itself.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from rl_core.api.foreign_names import GENERIC, ForeignName, foreign_name, foreign_path, is_foreign_block
from rl_core.api.pods import PodSpec
from rl_core.api.similar import most_similar, nearest

MAX_NAMES = 15
"""Blocks with more fields than this are not listed in a hint."""
SIMILAR_ELSEWHERE = 0.8
"""A field of another block is suggested only if its name is at least this similar to the unknown one (0 to 1, difflib's ratio)."""
MAX_LEVELS = 2
"""A field in another block is suggested only if it is at most this many levels deeper than the unknown name."""
PLAIN = re.compile(r"[A-Za-z_][\w./+-]*(, ?[A-Za-z_][\w./+-]*)*")
"""Pattern of texts that need no quotes in a YAML list, including several with commas between them."""
NAMES_PAGE = "docs/coming-from.md"
Location = tuple[int | str, ...]
Inner = list[tuple[tuple[str, ...], ForeignName | None]]
"""Settings inside a block: path in the block, and the setting of other libraries; None if no other library uses the name."""


def suggest(root: type[BaseModel], loc: Location, value: Any = None) -> str:
    """Return a hint for an unknown field of a job, such as `write algorithm.groupSize`. `loc` is its path, `value` its value."""
    name, block, fields = str(loc[-1]), loc[:-1], fields_at(root, loc[:-1])
    camel = to_camel(name)
    if camel != name and camel in fields:
        return f"write {camel}"
    path = [str(part) for part in loc[1:]]
    complete = foreign_path(path, whole=True)
    setting = complete or foreign_name(name, ".".join(path[:-1])) or foreign_path(path)
    # Another block of this schema has a field of the same name.
    if setting is not None and complete is None and camel in _paths(root):
        is_top_level = len(path) == 1 and not setting.is_called(name, alone=True)
        if (is_top_level or not setting.ours) and (elsewhere := _elsewhere(root, camel, block)):
            return f"did you mean {elsewhere}?"
    inner = _inner(value, tuple(path), len(path))
    if not any(foreign for _, foreign in inner):
        inner = []
    if setting is not None and not (
        is_foreign_block(name) and any(foreign and foreign.ours != setting.ours for _, foreign in inner)
    ):
        return _instead(setting)
    if not (inner and is_foreign_block(name)) and (similar := most_similar(camel, fields)):
        return f"did you mean {similar}?"
    if inner:
        return _instead_of_block(inner)
    if similar := nearest(camel, fields) or nearest(name, fields):
        return f"did you mean {similar}?"
    if not block and (similar := nearest(camel, fields_at(root, ("spec",)))):
        return f"did you mean spec.{similar}?"
    if is_foreign_block(name):
        return f"remove it; {NAMES_PAGE} lists the settings of other libraries"
    if name not in GENERIC and (elsewhere := _elsewhere(root, camel, block)):
        return f"did you mean {elsewhere}?"
    if fields and len(fields) <= MAX_NAMES:
        return f"remove it or use one of: {', '.join(sorted(fields))}"
    return "remove it; docs/reference/rljob.md lists the fields" if fields else "remove it"


def meant_field(root: type[BaseModel], loc: Location) -> str:
    """Return the field of the same block whose name is nearest to the unknown one at `loc`; "" if none is near."""
    return nearest(to_camel(str(loc[-1])), fields_at(root, loc[:-1]))


def theirs(loc: Location) -> Location:
    """Return the place in the job of the setting that another library has at the unknown field `loc`; () if none has."""
    setting = foreign_path([str(part) for part in loc[1:]])
    return ("spec", *setting.ours.split(".")) if setting is not None and setting.ours else ()


def _instead(setting: ForeignName) -> str:
    """Return what to write in place of a setting of another library, or why it must be removed."""
    note = setting.note.rstrip(".")
    if not setting.ours:
        return f"remove it, it has no counterpart here: {note}"
    return f"write {setting.ours}" + (f" ({note})" if note else "")


def _instead_of_block(inner: Inner) -> str:
    """Return what to write in place of the settings `inner` of an unknown block: a line for each, if there are several."""
    last_parts = [path[-1] for path, _ in inner]
    lines = []
    for path, setting in inner:
        name = path[-1] if last_parts.count(path[-1]) == 1 else ".".join(path)
        note = setting.note.rstrip(".") if setting else "no name that is known here"
        if setting is not None and setting.ours:
            lines.append(f"{setting.ours} for {name}" + (f" ({note})" if note else ""))
        else:
            lines.append(f"nothing for {name}: {note}")
    return f"write {lines[0]}" if len(lines) == 1 else "\n      ".join(["write in its place:", *lines])


def _inner(value: Any, path: tuple[str, ...], num_outer: int) -> Inner:
    """Return (path, counterpart here or None) for each setting in `value`, a block of the job that the schema does not know.

    `path` is where the block is, relative to spec. The returned paths are without their first `num_outer` parts.
    """
    if not isinstance(value, Mapping):
        return []
    settings: Inner = []
    for key, inner in value.items():
        place = (*path, str(key))
        nested = _inner(inner, place, num_outer)
        if not any(setting for _, setting in nested):
            setting = foreign_path(place, whole=isinstance(inner, Mapping))
            nested = [(place[num_outer:], setting)] if setting or not nested else nested
        settings += nested
    return settings


def _elsewhere(root: type[BaseModel], name: str, block: Location) -> str:
    """Return the path below spec of the most similar field of the schema, on a tie the one nearest to `block`; "" for none.

    Not suggested are fields more than MAX_LEVELS deeper, and those whose name is a mere prefix of `name`, as `train` of `trainer`.
    """
    depth = sum(isinstance(part, str) for part in block) - 1 + MAX_LEVELS
    paths = {
        name_in_spec: shallow
        for name_in_spec, paths_of_name in _paths(root).items()
        if (shallow := [path for path in paths_of_name if path.count(".") <= depth])
    }
    close = difflib.get_close_matches(name, sorted(paths), n=3, cutoff=SIMILAR_ELSEWHERE)
    close = [candidate for candidate in close if not name.startswith(candidate) or name in (candidate, candidate + "s")]
    if not close:
        return ""
    block_names = [part for part in block if isinstance(part, str)][1:2]
    return min(paths[close[0]], key=lambda path: (path.split(".")[:1] != block_names, path.count("."), path))


@functools.cache
def _paths(root: type[BaseModel]) -> Mapping[str, list[str]]:
    """Return the paths of all fields below spec, keyed by their last part."""
    paths: dict[str, list[str]] = {}
    for path in _walk(_model_of(root.model_fields["spec"].annotation), ()):
        paths.setdefault(path[-1], []).append(".".join(path))
    return paths


def _walk(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        field_path = (*path, field.alias or name)
        yield field_path
        inner = _model_of(field.annotation)
        # Fields inside the pod fields of a role are left out.
        if is_model(inner) and not (issubclass(model, PodSpec) and name in PodSpec.model_fields):
            yield from _walk(inner, field_path)


def fields_at(root: type[BaseModel], loc: Iterable[int | str]) -> list[str]:
    """Return the field names (aliases) of the model at a path of the schema; none where there is no model."""
    model = _model_at(root, loc)
    return [field.alias or name for name, field in model.model_fields.items()] if is_model(model) else []


def is_required(root: type[BaseModel], loc: Location) -> bool:
    """Return whether the field at a path of the schema must be given."""
    model = _model_at(root, loc[:-1])
    fields = model.model_fields.items() if is_model(model) else ()
    return any(field.is_required() for name, field in fields if (field.alias or name) == loc[-1])


def as_list(root: type[BaseModel], loc: Location, value: Any) -> str:
    """Return how to write `value` as the list that the field at `loc` takes, such as `[{name: wandb}]` for the value `wandb`; "" if it is ambiguous.

    "none" is the empty list.
    """
    if not isinstance(value, str | int | float) or value == "" or "'" in str(value):
        return ""
    if value == "none":
        return "[]"
    text = str(value) if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value)
    model = _model_at(root, loc)
    if not is_model(model):
        return f"[{text}]"
    required = [field.alias or name for name, field in model.model_fields.items() if field.is_required()]
    return f"[{{{required[0]}: {text}}}]" if len(required) == 1 else ""


def _model_at(root: type[BaseModel], loc: Iterable[int | str]) -> Any:
    model: Any = root
    for part in loc:
        if isinstance(part, int):
            continue
        fields: Mapping[str, Any] = getattr(model, "model_fields", {})
        match = next((field for name, field in fields.items() if (field.alias or name) == part), None)
        if match is None:
            return None
        model = _model_of(match.annotation)
    return model


def _model_of(annotation: Any) -> Any:
    """Return the model class inside `X | None`, list[X] or Annotated[...]."""
    if is_model(annotation):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if is_model(model := _model_of(inner)):
            return model
    return annotation


def is_model(value: Any) -> bool:
    """Return whether `value` is a class of the schema."""
    return isinstance(value, type) and issubclass(value, BaseModel)


def take_snake_case(root: type[BaseModel], document: Any, loc: Location = ()) -> Iterator[str]:
    """Replace snake_case names of fields in `document` by the camelCase ones; yield one problem for each.

    The schema itself takes both, for Python code; a job with snake_case names would run on one machine and be refused by a cluster.
    """
    if isinstance(document, list):
        for index, item in enumerate(document):
            yield from take_snake_case(root, item, (*loc, index))
        return
    model = _model_at(root, loc)
    if not isinstance(document, dict) or not is_model(model):
        return
    aliases = {name: field.alias for name, field in model.model_fields.items() if field.alias not in (None, name)}
    for name in [key for key in document if key in aliases]:
        value = document.pop(name)
        path = ".".join(str(part) for part in (*loc, name))
        yield f"{path}: is not a known field, write {aliases[name]}"
        document.setdefault(aliases[name], value)
    for name, value in document.items():
        yield from take_snake_case(root, value, (*loc, name))
