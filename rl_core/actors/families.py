"""Checks that a family of models computes packed rows as transformers computes rows.

Trainers compute attention over packed rows themselves, and score hidden states with the weight of the output layer. A family that does more
in one of these places, such as a cap on its logits, would train on wrong log-probabilities. Tests compare the families in `COMPARED` with
transformers; one of any other family is compared here, with a small model of random weights, before a trainer is built.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core.actors import hf
from rl_core.actors.forward import PackedBatch, attach_scoring, score
from rl_core.api.errors import ConfigError

COMPARED = frozenset({"llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma", "qwen3_moe", "mixtral", "olmoe"})
"""Values of `model_type` that tests compare (`tests/unit/actors/test_hf.py`)."""
TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32."""
LENGTHS = (12, 7, 12)
"""Tokens of the rows that are compared."""
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 5,
}
"""Sizes of the small model, where the configuration has them."""


def check_family(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a small model of the family of `config`, a parsed config.json, is not computed as transformers computes it."""
    if config.get("model_type") in COMPARED:
        return
    architecture = config["architectures"][0]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            difference = _difference(small_config(config))
    except (ConfigError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"a small {architecture} must be computed like one of transformers, got {error}; choose another model"
        ) from error
    if not difference < TOLERANCE:
        raise ConfigError(
            f"a model must compute log-probabilities of packed rows as transformers does, a small {architecture} differs by "
            f"{difference:.2g}: it changes logits or attention in a way that the trainer does not know; choose another model"
        )


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with few and small layers, among them one of each type."""
    small = dict(config) | {name: size for name, size in _SMALL.items() if config.get(name) is not None}
    if (heads := config.get("num_key_value_heads")) is not None:
        small["num_key_value_heads"] = 4 if heads == config["num_attention_heads"] else 2
    types = list(dict.fromkeys(config.get("layer_types") or ()))
    small["num_hidden_layers"] = max(2, len(types))
    if types:
        small["layer_types"] = (types * 2)[: small["num_hidden_layers"]]
    return small | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def _difference(config: Mapping[str, Any]) -> float:
    """Return the largest difference between log-probabilities of packed rows and those of transformers for the same rows."""
    model: Any = hf.build_model(config, dtype=torch.float32)
    attach_scoring(model)
    hf.materialize(model, torch.device("cpu"), hf.tied_names(model))
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    model.eval()
    ids = torch.randint(0, config["vocab_size"], (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    packed = score(model, PackedBatch.of(ids, LENGTHS, mask, torch.device("cpu")), temperature=1.0).log_probs
    assert packed is not None
    model.set_attn_implementation("eager")
    rows = [_log_probs(model, row[:length]) for row, length in zip(ids, LENGTHS, strict=True)]
    return max(
        float((packed_row[1 : len(reference) + 1] - reference).abs().max())
        for packed_row, reference in zip(packed, rows, strict=True)
    )


def _log_probs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens of a row but the first."""
    logits = model(input_ids=ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
