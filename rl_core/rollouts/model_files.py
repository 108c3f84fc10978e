"""Reads the files of the model folder, which a rollout receives by name when it registers with the runner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_core.api.errors import ConfigError, shown

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def max_positions(files: Mapping[str, bytes]) -> int:
    """Return the longest sequence that the model supports, tokens."""
    return int(read_config(files)["max_position_embeddings"])


def generation_eos_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json; empty if there is no such file.

    Raises ConfigError for a file that cannot be read: without its ids, every generation would run to its limit.
    """
    if GENERATION_FILE not in files:
        return ()
    eos = _parsed(files, GENERATION_FILE).get("eos_token_id")
    try:
        return token_ids(eos)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{GENERATION_FILE}: eos_token_id must be a token id, a list of them or null, got {shown(eos)}; mend or remove it"
        ) from error


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the parsed config.json. Raises ConfigError when it is missing or not a JSON object."""
    if CONFIG_FILE not in files:
        raise ConfigError(
            f"model files must hold {CONFIG_FILE}, got {sorted(files)}; point model.path to a model folder"
        )
    return _parsed(files, CONFIG_FILE)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return an end-of-sequence setting (None, one id or several) as a tuple."""
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        raw = json.loads(files[name])
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON: {error}; mend the file in the folder of model.path") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{name} must hold an object, got {type(raw).__name__}; mend the file in the folder of model.path"
        )
    return raw
