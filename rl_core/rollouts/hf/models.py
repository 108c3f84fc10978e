"""Creates a `Decoder` from a transformers model, from fused weights, or from the files of a model folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.api.errors import RolloutConfigError
from rl_core.rollouts.hf.config import DecoderConfig, unsupported
from rl_core.rollouts.hf.decoder import Decoder, LeanDecoder
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.model_files import read_config, token_ids


def decoder_for(model: Any, *, max_seq_len: int, compile: bool = False, float32_head: bool = False) -> Decoder:
    """Return the lean decoder for `DecoderWeights` or a transformers model of its families, else the generic one.

    `compile` and `float32_head` are those of `LeanDecoder`.

    Raises RolloutConfigError for `compile` if the model is of another family, or the machine has no C++ compiler.
    """
    if compile:
        _require_compiler()
    lean = isinstance(model, DecoderWeights)
    if lean or unsupported(model.config.to_dict()) is None:
        weights = model if lean else _fused(model)
        return LeanDecoder(weights, max_seq_len=max_seq_len, compile=compile, float32_head=float32_head)
    if compile:
        raise RolloutConfigError(
            f"compile is honoured for the lean families only, got {type(model).__name__}; set it to false"
        )
    from rl_core.rollouts.hf.generic import TransformersDecoder, compute_head_in_float32

    if float32_head:
        compute_head_in_float32(model)
    return TransformersDecoder(model)


def _require_compiler() -> None:
    """Raise RolloutConfigError if there is no C++ compiler: torch.compile itself looks for one at the first call only."""
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
    """Return a model with unfilled weights for the config.json among the `files` of a model folder.

    It is a `DecoderWeights` for the families of the lean forward, which needs no transformers, else a transformers model. Raises ConfigError
    if config.json is missing or not JSON.
    """
    raw = read_config(files)
    if unsupported(raw) is None:
        return DecoderWeights(DecoderConfig.from_dict(raw), dtype=dtype, device=device)
    from rl_core.rollouts.hf.generic import empty_transformers_model

    return empty_transformers_model(raw, dtype=dtype, device=device)


def describe_model(
    raw: Mapping[str, Any], *, dtype: str
) -> tuple[dict[str, tuple[tuple[int, ...], str]], tuple[int, ...]]:
    """Return name -> (shape, dtype) of the tensors of a model folder, and the end-of-sequence ids, by its parsed config.json.

    No memory is allocated for the tensors. transformers is imported for models that the lean forward does not run.
    """
    kind = getattr(torch, dtype)
    if unsupported(raw) is None:
        config = DecoderConfig.from_dict(raw)
        weights = DecoderWeights(config, dtype=kind, device="meta")
        return {name: (shape, dtype) for name, shape in weights.names_and_shapes().items()}, config.eos_token_ids
    from rl_core.rollouts.hf.generic import ModelWeights, empty_transformers_model

    with torch.device("meta"):
        model = empty_transformers_model(raw, dtype=kind, device="meta")
    of_model = ModelWeights(model)
    dtypes = of_model.dtypes()
    shapes = {name: (shape, dtypes[name]) for name, shape in of_model.names_and_shapes().items()}
    return shapes, token_ids(model.config.get_text_config().eos_token_id)
