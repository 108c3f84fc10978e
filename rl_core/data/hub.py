"""Fetches `hf://` references to models and data sets into the local cache before a job starts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob

HUB_SCHEME = "hf://"
HUB_ENDINGS = (".parquet", ".jsonl", ".json", ".ndjson")
"""Endings of files of rows."""
ANSWER_S = 10.0
"""Seconds for the hub to answer when a job is validated."""


def references(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (field, holder, key) for each reference to a model or a data set in a spec with camelCase names, which may break the schema.

    The field is a path such as `data.sets.0.train`, and `holder[key]` the reference.
    """
    model, data = (spec.get(block) if isinstance(spec.get(block), dict) else {} for block in ("model", "data"))
    sets = data.get("sets") if isinstance(data, dict) else None
    holders = [("data", data), *((f"data.sets.{n}", one) for n, one in enumerate(sets if isinstance(sets, list) else []))]
    found = [("model.path", model, "path")]
    found += [(f"{field}.{key}", holder, key) for field, holder in holders for key in ("train", "validation")]
    for field, holder, key in found:
        if isinstance(holder, dict) and isinstance(holder.get(key), str):
            yield field, holder, key


def fetch_references(job: RLJob) -> RLJob:
    """Fetch the `hf://` references of a job and return the job with local paths in their place.

    Called by `rljob run` before it starts processes, and by the runner on a cluster. Raises ConfigError if a reference cannot be fetched.
    """
    whole = job.model_dump(mode="json", by_alias=True)
    for _, holder, key in references(whole["spec"]):
        if holder[key].startswith(HUB_SCHEME):
            holder[key] = str(fetch(holder[key]))
    return RLJob.model_validate(whole)


class HubReference(NamedTuple):
    """A parsed `hf://` reference."""

    repo: str
    revision: str | None
    file: str
    """File of the data set; empty for a model, and for a split."""
    config: str | None
    split: str
    """Split of a data set; empty for a model, and for a file."""


def parse(reference: str) -> HubReference:
    """Return the parts of `hf://owner/name[@revision]`, followed for data by `/FILE` or by `?split=S[&config=C]`. Raises ConfigError."""
    path, _, query = reference.removeprefix(HUB_SCHEME).partition("?")
    parts, options = path.split("/", 2), dict(parse_qsl(query, keep_blank_values=True))
    name, _, revision = parts[1].partition("@") if len(parts) > 1 else ("", "", "")
    known = not query or (len(parts) == 2 and options.get("split") and options.keys() <= {"split", "config"})
    if not all(parts) or not name or not known:
        raise ConfigError(
            f"a hub reference must read hf://owner/name[@revision], and for data go on with /FILE or ?split=SPLIT[&config=CONFIG], "
            f"got {reference}; correct it"
        )
    file = parts[2] if len(parts) == 3 else ""
    return HubReference(f"{parts[0]}/{name}", revision or None, file, options.get("config"), options.get("split", ""))


def fetch(reference: str) -> Path:
    """Fetch a model folder, a file or a split of a data set (see `parse`); return its local path, for a split that of a parquet file.

    The endpoint is huggingface_hub's (HF_ENDPOINT). Raises ConfigError when the reference is malformed or cannot be fetched.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{reference} needs huggingface-hub: pip install 'rljob[actor]', or use a local path"
        ) from error
    wanted = parse(reference)
    try:
        if wanted.split:
            return _fetch_split(wanted)
        if wanted.file:
            return Path(hf_hub_download(wanted.repo, wanted.file, revision=wanted.revision, repo_type="dataset"))
        patterns = ["*.json", "*.jinja", "*.safetensors", "*.model"]
        return Path(snapshot_download(wanted.repo, revision=wanted.revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{reference} must be reachable, got {type(error).__name__}: {_first_line(error)}; check name, revision and HF_ENDPOINT"
        ) from error


def _fetch_split(wanted: HubReference) -> Path:
    """Return a parquet file with the rows of a split, which is kept in the cache of the hub by the fingerprint of its content."""
    from datasets import load_dataset
    from huggingface_hub.constants import HF_HOME

    rows = load_dataset(wanted.repo, wanted.config, split=wanted.split, revision=wanted.revision)
    path = Path(HF_HOME) / "rljob" / f"{rows._fingerprint}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        rows.to_parquet(part)
        part.rename(path)
    return path


def hub_problem(reference: str, *, data: bool) -> tuple[str, str]:
    """Ask the hub whether a reference exists, to a model or to `data`, without its content. Returns (problem, why it is not known).

    Both are empty for a reference that exists. The hub has ANSWER_S seconds to answer.
    """
    try:
        wanted = parse(reference)
        if data and not (wanted.split or wanted.file.endswith(HUB_ENDINGS)):
            return (
                f"must name a split, ?split=train, or a file, /FILE with {', '.join(HUB_ENDINGS)}, of the data set, got {reference}; add it",
                "",
            )
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    except ConfigError as error:
        return str(error), ""
    except ImportError:
        return "", "huggingface-hub is not installed (pip install 'rljob[actor]')"
    kind = "dataset" if data else "model"
    try:
        info = HfApi().repo_info(wanted.repo, repo_type=kind, revision=wanted.revision, timeout=ANSWER_S)
        if wanted.split:
            return _split_problem(wanted), ""
    except RevisionNotFoundError:
        return f"{kind} {wanted.repo} must have the revision {wanted.revision} on the hub, got none; correct it", ""
    except (RepositoryNotFoundError, HFValidationError):
        return (
            f"must be a {kind} of the hub that HF_TOKEN may read, got none with the name {wanted.repo}; check the name and the token",
            "",
        )
    except Exception as error:  # the hub's client raises what its HTTP library does
        return "", f"the hub did not answer ({type(error).__name__}: {_first_line(error)})"
    needed = wanted.file if data else "config.json"
    if needed not in {file.rfilename for file in info.siblings or ()}:
        return f"{kind} {wanted.repo} must have the file {needed}, got none; correct the name", ""
    return "", ""


def _split_problem(wanted: HubReference) -> str:
    """Return what is wrong with the config or the split of a data set that exists; "" where both are there."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    try:
        splits = list(load_dataset_builder(wanted.repo, wanted.config, revision=wanted.revision).config.data_files or ())
    except (ValueError, FileNotFoundError, DatasetNotFoundError) as error:
        return f"data set {wanted.repo} must be readable, got {_first_line(error)}; name one in config"
    name = wanted.split.partition("[")[0]
    if name not in splits:
        return f"data set {wanted.repo} must have the split {name}, got {', '.join(map(str, splits))}; choose one of these"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
