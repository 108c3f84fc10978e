"""Fetches `hf://` references to models and data sets into the local cache before a job starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob

HUB_SCHEME = "hf://"
HUB_ENDINGS = (".parquet", ".jsonl", ".json", ".ndjson")
"""Endings of files of rows."""
PARQUET_BRANCH = "refs/convert/parquet"
"""Branch in which the hub keeps the rows of each public data set as `CONFIG/SPLIT/0000.parquet`, ...: https://huggingface.co/docs/dataset-viewer/parquet"""
REFUSALS = (401, 403, 404, 410)
"""HTTP statuses of what does not exist, or not for this token."""
MODEL_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model"]
"""Patterns of the files of a model that a job reads."""
ANSWER_S = 10.0
"""Seconds for the hub to answer when a job is validated."""


def references(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (field, holder, key) for each reference to a model or a data set in a spec with camelCase names, which may break the schema.

    The field is a path such as `data.sets.0.train`, and `holder[key]` the reference.
    """
    model, data = spec.get("model"), spec.get("data")
    sets = data.get("sets") if isinstance(data, dict) else None
    holders = [
        ("data", data),
        *((f"data.sets.{n}", data_set) for n, data_set in enumerate(sets if isinstance(sets, list) else [])),
    ]
    candidates = [("model.path", model, "path")]
    candidates += [(f"{field}.{key}", holder, key) for field, holder in holders for key in ("train", "validation")]
    for field, holder, key in candidates:
        if isinstance(holder, dict) and isinstance(holder.get(key), str):
            yield field, holder, key


def fetch_references(job: RLJob) -> RLJob:
    """Fetch the `hf://` references of a job and return the job with local paths in their place.

    Called by `rljob run` before it starts processes, and by the runner on a cluster. Raises ConfigError if a reference cannot be fetched.
    """
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for _, holder, key in references(document["spec"]):
        if holder[key].startswith(HUB_SCHEME):
            holder[key] = str(fetch(holder[key]))
    return RLJob.model_validate(document)


class HubReference(NamedTuple):
    """A parsed `hf://` reference."""

    repo: str
    revision: str | None
    file: str
    """File of a data set; empty for a model and for a split."""
    split: str
    """Folder of a split in PARQUET_BRANCH, `CONFIG/SPLIT`; empty for a model and for a file."""


def parse(reference: str) -> HubReference:
    """Return the parts of `hf://owner/name[@revision]`, followed for data by `/FILE` or by `?split=S[&config=C]`. Raises ConfigError."""
    path, _, query = reference.removeprefix(HUB_SCHEME).partition("?")
    parts, options = path.split("/", 2), dict(parse_qsl(query))
    name, _, revision = parts[1].partition("@") if len(parts) > 1 else ("", "", "")
    is_valid_query = not query or (len(parts) == 2 and "split" in options and options.keys() <= {"split", "config"})
    if not all(parts) or not name or not is_valid_query:
        raise ConfigError(
            "a hub reference must read hf://owner/name[@revision], and for data go on with /FILE or with ?split=SPLIT[&config=CONFIG], "
            f"got {reference}; correct it"
        )
    rows = f"{options.get('config', 'default')}/{options['split']}" if query else ""
    if rows and not revision:
        revision = PARQUET_BRANCH
    return HubReference(f"{parts[0]}/{name}", revision or None, parts[2] if len(parts) == 3 else "", rows)


def fetch(reference: str) -> Path:
    """Fetch a model folder, a data file, or a split of a data set (see `parse`); return its local path, for a split its folder of parquet files.

    The endpoint is huggingface_hub's (HF_ENDPOINT). Raises ConfigError when the reference is malformed or cannot be fetched.
    """
    return _fetch(reference, MODEL_FILES)


def _fetch(reference: str, model_files: list[str]) -> Path:
    """Fetch a reference; of a model only the files that match `model_files`."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{reference} needs huggingface-hub: pip install 'rljob[actor]', or use a local path"
        ) from error
    parsed = parse(reference)
    patterns = [f"{parsed.split}/*.parquet"] if parsed.split else model_files
    try:
        if parsed.file:
            return Path(hf_hub_download(parsed.repo, parsed.file, revision=parsed.revision, repo_type="dataset"))
        kind = "dataset" if parsed.split else "model"
        folder = snapshot_download(parsed.repo, revision=parsed.revision, repo_type=kind, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{reference} must be reachable, got {type(error).__name__}: {_first_line(error)}; check name, revision and HF_ENDPOINT"
        ) from error
    if not (Path(folder) / parsed.split).is_dir():
        raise ConfigError(
            f"{reference} must be a split that the hub has as parquet, got no {patterns[0]} at revision {parsed.revision}; "
            "correct config or split, or name a file of the data set"
        )
    return Path(folder) / parsed.split


def fetch_config(reference: str) -> Path:
    """Fetch config.json of the model at an `hf://` reference; return the local folder that holds it. Raises ConfigError as `fetch` does."""
    return _fetch(reference, ["config.json"])


def hub_problem(reference: str, *, data: bool) -> str:
    """Ask the hub whether a reference to a model, or to `data`, exists; return what is wrong, "" for nothing. Its content is not fetched.

    Raises ConfigError for a malformed reference, and ConnectionError without an answer within ANSWER_S seconds.
    """
    parsed = parse(reference)
    if data and not (parsed.split or parsed.file.endswith(HUB_ENDINGS)):
        return (
            f"must name a split, ?split=train, with &config=NAME if the data set has several configurations, or a file, /FILE with "
            f"{', '.join(HUB_ENDINGS)}, got {reference}; add it"
        )
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError
    except ImportError as error:
        raise ConnectionError("huggingface-hub is not installed (pip install 'rljob[actor]')") from error
    kind = "dataset" if data else "model"
    try:
        info = HfApi().repo_info(parsed.repo, repo_type=kind, revision=parsed.revision, timeout=ANSWER_S)
    except RevisionNotFoundError:
        return f"must be a {kind} with the revision {parsed.revision} on the hub, got none; correct it"
    except Exception as error:  # the hub's client raises what its HTTP library does
        # Mirrors answer 404 without the header by which the client tells a missing repository from other errors.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
        if isinstance(error, HFValidationError) or status in REFUSALS:
            return f"must be a {kind} of the hub that HF_TOKEN may read, got none named {parsed.repo}; check the name and the token"
        raise ConnectionError(f"the hub did not answer ({type(error).__name__}: {_first_line(error)})") from error
    files = [file.rfilename for file in info.siblings or ()]
    if parsed.split:
        splits = {file.rpartition("/")[0] for file in files if file.endswith(".parquet")}
        return (
            ""
            if parsed.split in splits
            else (
                f"must be one of the CONFIG/SPLIT of {parsed.repo}, {', '.join(sorted(splits))}, got {parsed.split}; correct ?split and &config"
            )
        )
    needed = parsed.file if data else "config.json"
    return (
        ""
        if needed in files
        else f"must be a {kind} with the file {needed}, got none in {parsed.repo}; correct the name"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
