"""Reads a job file: parses YAML, applies overrides, makes paths absolute, downloads models and data from the Hugging Face hub."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.api.text import load_value, read_documents
from rl_core.cli.problems import find_problems
from rl_core.data.hub import HUB_SCHEME, references
from rl_core.data.source import GENERATED_SCHEME

MODEL_PATH = "modelPath"
"""Field of the `config` of a group that holds the folder of its model, a path as `model.path`."""


class JobProblems(ConfigError):
    """A job with problems; `problems` holds one line each."""

    def __init__(self, file: Path, problems: Sequence[str]) -> None:
        super().__init__(
            f"{file}: {len(problems)} problem{'s' if len(problems) != 1 else ''}\n"
            + "\n".join(f"  {line}" for line in problems)
        )
        self.problems = list(problems)


def read_document(file: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the RLJob of `file` with `PATH=VALUE` overrides applied; other documents in it (volume claims) are for a cluster.

    Raises ConfigError naming file and line, or how many RLJobs there are.
    """
    document = _the_job(file, read_documents(file))
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file}: must hold one mapping with apiVersion, kind, metadata and spec, got {type(document).__name__}"
        )
    for setting in settings:
        override(document, setting)
    return document


def _the_job(file: Path, documents: Sequence[Any]) -> Any:
    """Return the only document of a file, or of several documents the only RLJob."""
    if len(documents) < 2:
        return documents[0] if documents else None
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == "RLJob"]
    if len(jobs) != 1:
        names = ", ".join(str((document.get("metadata") or {}).get("name")) for document in jobs) or "none"
        raise ConfigError(
            f"{file}: must hold exactly one RLJob, got {len(jobs)} ({names}); give each a file of its own"
        )
    return jobs[0]


def override(document: dict[str, Any], setting: str) -> None:
    """Set the field that `setting`, PATH=VALUE, names. Raises ConfigError for one that cannot be read."""
    path, separator, text = setting.partition("=")
    parts = path.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set must read path=value, as algorithm.steps=100, got {setting!r}; correct it")
    if parts[0] not in ("spec", "metadata", "apiVersion", "kind"):
        parts = ["spec", *parts]
    holder = document
    for part in parts[:-1]:
        holder = holder.setdefault(part, {})
        if not isinstance(holder, dict):
            raise ConfigError(f"--set {path}: {part} must be a mapping, got {holder!r}; correct the path")
    try:
        holder[parts[-1]] = load_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {path}: the value must be YAML, got {text!r}; quote it") from error


def load_job(file: Path, settings: Sequence[str] = ()) -> RLJob:
    """Return the validated job with absolute paths; relative paths start at the folder of the job file. Raises JobProblems."""
    document = read_document(file, settings)
    job, problems = find_problems(document)
    if job is None:
        raise JobProblems(file, problems)
    return with_absolute_paths(job, file)


def with_absolute_paths(job: RLJob, file: Path) -> RLJob:
    """Return the job with absolute paths; relative ones start at the folder of `file`.

    Fields that `job` does not give stay in that state: they are not in `model_fields_set`.
    """
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = document["spec"]
    for _, holder, key in path_fields(spec):
        holder[key] = absolute(file, holder[key])
    for group in spec.get("groups") or ():
        config = group.get("config") or {}
        if isinstance(config.get(MODEL_PATH), str):
            config[MODEL_PATH] = absolute(file, config[MODEL_PATH])
    source = spec.get("checkpoint", {}).get("resumeFrom") or {}
    if source.get("path") is not None:
        source["path"] = absolute(file, source["path"])
    return RLJob.model_validate(document)


def path_fields(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (field, holder, key) for each field of a spec that holds a path or a reference; the path is `holder[key]`."""
    yield from references(spec)
    checkpoint = spec.get("checkpoint", {})
    if checkpoint.get("path") is not None:
        yield "checkpoint.path", checkpoint, "path"


def absolute(file: Path, reference: str) -> str:
    """Return a path of the job file as an absolute path; a reference with a scheme is returned as it is."""
    if reference.startswith((HUB_SCHEME, GENERATED_SCHEME)):
        return reference
    return str((file.parent / Path(reference).expanduser()).resolve())
