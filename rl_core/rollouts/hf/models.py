"""From what a caller has (a transformers model, fused weights, or the files of a model folder) to a `Decoder`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.api.errors import ConfigError, RolloutConfigError, shown
from rl_core.rollouts.hf.config import DecoderConfig, token_ids, unsupported
from rl_core.rollouts.hf.decoder import Decoder, LeanDecoder
from rl_core.rollouts.hf.weights import DecoderWeights

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def decoder_for(model: Any, *, max_seq_len: int, compile: bool = False) -> Decoder:
    """Return the lean decoder for `DecoderWeights` or a transformers model of its families, else the generic one.

    Raises RolloutConfigError for `compile` where the family or the machine cannot.
    """
    if compile:
        _require_compiler()
    if isinstance(model, DecoderWeights):
        return LeanDecoder(model, max_seq_len=max_seq_len, compile=compile)
    if unsupported(model.config.to_dict()) is None:
        return LeanDecoder(_fused(model), max_seq_len=max_seq_len, compile=compile)
    if compile:
        raise RolloutConfigError(
            f"compile is honoured for the lean families only, got {type(model).__name__}; set it to false"
        )
    from rl_core.rollouts.hf.generic import TransformersDecoder

    return TransformersDecoder(model)


def _require_compiler() -> None:
    """Refuse before the first prompt: torch.compile looks for its compiler at the first call only."""
    names = [os.environ.get("CXX") or "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise RolloutConfigError(
            f"rollout.compile needs a C++ compiler on the rollout's machine, found none of {', '.join(names)}; "
            "add one to the image, or set rollout.compile: false"
        )


def _fused(model: Any) -> DecoderWeights:
    """Return the weights of a transformers model, copied into the fused layout."""
    parameter = next(model.parameters())
    config = DecoderConfig.from_dict(model.config.to_dict())
    weights = DecoderWeights(config, dtype=parameter.dtype, device=str(parameter.device))
    weights.load(model.state_dict().items())
    return weights


def model_from_files(files: Mapping[str, bytes], *, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return a model with unfilled weights, from the bytes of a model folder's config.json.

    A `DecoderWeights` for the lean families (no transformers import), else a transformers model. Raises ConfigError
    when config.json is missing or not JSON.
    """
    raw = read_config(files)
    if unsupported(raw) is None:
        return DecoderWeights(DecoderConfig.from_dict(raw), dtype=dtype, device=device)
    from rl_core.rollouts.hf.generic import empty_transformers_model

    return empty_transformers_model(raw, dtype=dtype, device=device)


def generation_eos_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, none where there is no such file.

    Raises ConfigError for one that cannot be read: without its ids, generations would run on to their limit.
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
