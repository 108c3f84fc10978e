"""Fetches `hf://repo[@revision][/file]` references into the local cache before a job starts."""

from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob

HUB_SCHEME = "hf://"
REFERENCE_FIELDS = (("model", "path"), ("data", "train"), ("data", "validation"))
"""Fields of the spec that may hold a reference."""


def fetch_references(job: RLJob) -> RLJob:
    """Fetch the `hf://` references of a job and return the job with local paths in their place.

    Called by `rljob run` before it starts processes, and by the runner on a cluster. Raises ConfigError if a reference cannot be fetched.
    """
    whole = job.model_dump(mode="json", by_alias=True)
    for block, field in REFERENCE_FIELDS:
        value = whole["spec"][block][field]
        if value is not None and value.startswith(HUB_SCHEME):
            whole["spec"][block][field] = str(fetch(value))
    return RLJob.model_validate(whole)


def fetch(reference: str) -> Path:
    """Fetch a model folder, `hf://owner/name[@revision]`, or a data file, `hf://owner/name[@revision]/file`; return its local path.

    The endpoint is huggingface_hub's (HF_ENDPOINT). Raises ConfigError when the reference is malformed or cannot be fetched.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{reference} needs huggingface-hub: pip install 'rljob[actor]', or use a local path"
        ) from error
    parts = reference.removeprefix(HUB_SCHEME).split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"a hub reference must read hf://owner/name[@revision][/file], got {reference}; correct it")
    name, _, revision = parts[1].partition("@")
    repo, at = f"{parts[0]}/{name}", revision or None
    try:
        if len(parts) == 3:
            return Path(hf_hub_download(repo, parts[2], revision=at, repo_type="dataset"))
        return Path(
            snapshot_download(repo, revision=at, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{reference} must be reachable, got {type(error).__name__}: {str(error).splitlines()[0]}; check name, revision and HF_ENDPOINT"
        ) from error
