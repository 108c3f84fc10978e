"""`hf://repo[@revision][/file]` references: fetched to the local cache before anything starts."""

from pathlib import Path

from rl_core.api.errors import ConfigError

HUB_SCHEME = "hf://"


def fetch(reference: str) -> Path:
    """Return the local path of `hf://owner/name[@revision]` (a model folder) or `hf://owner/name[@revision]/file` (a data set file).

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
