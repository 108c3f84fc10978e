"""Generates the reference of the job schema: `examples/reference.yaml` (every field with its default), a Markdown table, the table of
other libraries' names, and the list of metrics.

python -m rl_core.cli.reference [--check]     # --check: exit 1 when a file differs from the schema
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_core.api.descriptions import descriptions
from rl_core.api.foreign_names import LIBRARIES, foreign_names
from rl_core.api.identity import ROLES
from rl_core.api.job import API_VERSION, RLJobSpec
from rl_core.api.pods import PodSpec
from rl_core.api.status import RLJobStatus
from rl_core.cli.reference_rows import Row, rows
from rl_core.observability import metric_list

YAML_PATH = Path("examples/reference.yaml")
MARKDOWN_PATH = Path("docs/reference/rljob.md")
MAX_LINE = 140
"""Most characters of a line of the page."""
NAMES_PATH = Path("docs/coming-from.md")
METRICS_PATH = Path("docs/metrics.md")
EXAMPLES = {"model.path": "model", "data.train": "data/train.jsonl"}
"""Values in the reference job of fields that it must have and that have no default."""
GENERATED = "Generated from rl_core.api.job by `make docs`; edit the schema's docstrings instead."


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None, str]]:
    """Yield (path, field, inner model, meaning) depth first; the inner model is None for a leaf or an optional block."""
    meanings = descriptions(model)
    own_first = sorted(model.model_fields.items(), key=lambda item: item[0] in PodSpec.model_fields)
    for name, field in own_first:
        path = f"{prefix}{field.alias or name}"
        inner = (
            field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
        )
        yield path, field, inner, " ".join(meanings.get(name, "").split())
        if inner is not None:
            yield from fields_of(inner, f"{path}.")


def default_text(path: str, field: FieldInfo) -> str:
    """Return the field's default as YAML in flow style."""
    value = field.get_default(call_default_factory=True)
    if path in EXAMPLES:
        value = EXAMPLES[path]
    if isinstance(value, list):
        value = [item.model_dump(mode="json", by_alias=True) if isinstance(item, BaseModel) else item for item in value]
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def render_yaml() -> str:
    """Return a complete job with every field, its default and meaning."""
    lines = [
        f"# Every field of an RLJob with its default. {GENERATED}",
        f"apiVersion: {API_VERSION}",
        "kind: RLJob",
        "metadata: {name: reference}",
        "spec:",
    ]
    for path, field, inner, meaning in fields_of(RLJobSpec):
        indent = "  " * (path.count(".") + 1)
        key = path.rpartition(".")[2]
        lines.append(
            f"{indent}{key}:  # {meaning}"
            if inner is not None
            else f"{indent}{key}: {default_text(path, field)}  # {meaning}"
        )
    return "\n".join(lines) + "\n"


def render_markdown() -> str:
    """Return the fields as tables: those of the spec, the pod fields that all groups share, the status."""
    pod_fields = {str(field.alias) for field in PodSpec.model_fields.values()}
    hidden = {f"{block}.{name}" for block in (*ROLES, "groups[]") for name in pod_fields}
    spec = [
        row for row in rows(RLJobSpec) if row.path.removesuffix("[]") not in hidden and not _below(row.path, hidden)
    ]
    parts = [
        ("RLJob fields", f"{GENERATED} Paths are below `spec`; `[]` is an entry of a list.", spec),
        (
            "Pod fields",
            "Below `actor`, `rollout`, `env` and each of `groups`. For clusters; local runs read `env` alone.\n"
            "The default of `actor.terminationGracePeriodSeconds` is 120.",
            rows(PodSpec),
        ),
        ("Status", "Below `status`; written by the operator.", rows(RLJobStatus)),
    ]
    return "\n".join(_section(title, introduction, field_rows) for title, introduction, field_rows in parts)


def _below(path: str, blocks: set[str]) -> bool:
    return any(path.startswith((f"{block}.", f"{block}[]")) for block in blocks)


def _section(title: str, introduction: str, field_rows: Iterable[Row]) -> str:
    heading = "#" if title == "RLJob fields" else "##"
    items = (f"- `{row.path}` ({row.type}; {_default(row)}): {row.meaning}" for row in field_rows)
    wrapped = (
        textwrap.fill(item, MAX_LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for item in items
    )
    return "\n".join([f"{heading} {title}", "", introduction, "", *wrapped]) + "\n"


def _default(row: Row) -> str:
    return row.default if row.default == "required" else f"default {row.default}"


def render_names() -> str:
    """Return docs/coming-from.md: a table for each library, one name in a row."""
    lines = [
        "# Coming from TRL, verl, prime-rl or OpenRLHF",
        "",
        "Generated from rl_core/api/foreign_names.yaml by `make docs`. Fields of a job are below `spec`, in camelCase; a job that uses another",
        "library's name is refused, and the message gives the name used here. What a field means: [reference](reference/rljob.md). Names of",
        "several versions are listed. The keys of verl below `actor_rollout_ref` are written without it. For a name without a counterpart",
        "(none), the note says what happens here instead.",
        "",
        "Reward functions: ours is called as `score(prompts, completions, **columns)` with lists of texts and columns of the data. One of TRL",
        "needs `prompts` as its first parameter. One of verl takes a single sample, so `compute_score(data_source, solution_str, ground_truth)`",
        "becomes `[compute_score(s, c, g) for s, c, g in zip(data_source, completions, ground_truth)]`; see",
        "[writing an environment](writing-an-env.md).",
    ]
    for library in LIBRARIES:
        lines += ["", f"## {library}", "", f"| {library} | here | note |", "| --- | --- | --- |"]
        for setting in foreign_names():
            own_name = f"`{setting.ours}`" if setting.ours else "none"
            lines += [f"| `{name}` | {own_name} | {setting.note} |" for name in setting.names.get(library, ())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the files, or with --check compare them; return the exit code."""
    texts = {
        YAML_PATH: render_yaml(),
        MARKDOWN_PATH: render_markdown(),
        NAMES_PATH: render_names(),
        METRICS_PATH: metric_list.render_page(),
    }
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            sys.stderr.write(f"{path} differs from the schema; run make docs\n")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
