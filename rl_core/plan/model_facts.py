"""The few numbers about a model that memory estimates need, read from its folder without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_core.api.errors import ConfigError

LENGTH_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""What config.json may call the longest sequence, tokens."""
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "max_length": LENGTH_NAMES,
}
_PLAIN_MLP = frozenset({"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "starcoder2"})
"""Model types whose feed-forward has two matrices; the others have a gated one with three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of a decoder-only language model. Tied parameters count once."""

    parameters: int
    """All parameters."""
    layer: int
    """Parameters of one decoder layer."""
    hidden: int
    """Hidden size, the width of the residual stream."""
    layers: int
    """Number of decoder layers."""
    vocab: int
    """Number of rows of the embedding matrix."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads."""
    head_dim: int
    """Width of a head."""
    head_norms: bool
    """Whether the heads of queries and keys are normalised, as in Qwen3."""
    inner: int
    """Intermediate size of the feed-forward network. In a mixture of experts: the sum over all experts that compute a token."""
    max_length: int
    """Longest sequence, tokens."""
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that the router selects for a token; shared experts do not count. 0 for a dense model."""

    @classmethod
    def from_config(cls, path: str | Path) -> "ModelFacts":
        """Return the facts of a Hugging Face folder, or of its config.json.

        Parameters are counted from the headers of safetensors files beside it, else from the configuration.
        Raises ConfigError when there is no readable config.json or it lacks a size.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        config = _read_config(file)
        hidden, heads = _size(config, "hidden", file), _size(config, "heads", file)
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        layers, vocab = _size(config, "layers", file), _size(config, "vocab", file)
        layer = _layer_parameters(config, hidden, heads, kv_heads, head_dim)
        embedding = vocab * hidden
        untied = 0 if config.get("tie_word_embeddings", config.get("model_type") == "gpt2") else embedding
        num_stored = sum(map(prod, stored_shapes(file.parent).values()))
        return cls(
            parameters=num_stored or embedding + untied + layers * layer + hidden,
            layer=layer,
            hidden=hidden,
            layers=layers,
            vocab=vocab,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_norms=str(config.get("model_type", "")).startswith("qwen3"),
            inner=_inner(config, hidden),
            max_length=_size(config, "max_length", file),
            experts=num_experts(config),
            experts_per_token=_experts_per_token(config),
        )


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path must hold a readable config.json, got {file}: {error}; give a model folder"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object, got {type(config).__name__}")
    text = config.get("text_config")  # Multimodal models have the sizes of the language model here.
    return config | text if isinstance(text, dict) else config


def _size(config: Mapping[str, Any], name: str, file: Path) -> int:
    for key in _NAMES[name]:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"{file} must give {' or '.join(_NAMES[name])} as a positive integer, got none")


def _layer_parameters(config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the parameters of a decoder layer: attention, feed-forward (all experts), two norms; biases are left out."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    matrices = 2 if config.get("model_type") in _PLAIN_MLP else 3
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    experts = num_experts(config)
    if not experts:
        return int(attention + matrices * hidden * inner + 2 * hidden)
    expert_inner = config.get("moe_intermediate_size") or inner
    shared = config.get("shared_expert_intermediate_size") or expert_inner * (config.get("n_shared_experts") or 0)
    inner = expert_inner * experts + shared
    return int(attention + matrices * hidden * inner + hidden * experts + 2 * hidden)


def num_experts(config: Mapping[str, Any]) -> int:
    """Return how many experts a layer of a mixture of experts has, by the model's config.json; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _experts_per_token(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts_per_tok") or 1) if num_experts(config) else 0


def _inner(config: Mapping[str, Any], hidden: int) -> int:
    width = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    if not num_experts(config):
        return int(width)
    expert = config.get("moe_intermediate_size") or width
    shared = config.get("shared_expert_intermediate_size") or expert * (config.get("n_shared_experts") or 0)
    return int(expert * _experts_per_token(config) + shared)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name -> shape over all safetensors files of `folder`; only headers are read.

    Raises ConfigError naming a file that is damaged or cut short.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} must be a whole safetensors file, got: {error}; fetch it again") from error
    return shapes
