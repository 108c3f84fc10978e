"""`DecoderConfig`: the sizes of a decoder from its `config.json`, for the model families of the built-in forward. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.api.errors import RolloutConfigError
from rl_core.rollouts.model_files import token_ids

FAMILIES = frozenset({"qwen2", "qwen3", "llama", "mistral"})
"""Values of `model_type` that the built-in forward (`decoder.LeanDecoder`) runs. Other models are run through transformers."""
ROPE_TYPES = frozenset({"default", "linear", "llama3"})
DEFAULT_EOS: dict[str, int | None] = {"llama": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The sizes and options of a model that the built-in forward needs."""

    family: str
    """One of `FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    """Longest sequence that the model supports, tokens."""
    rope_theta: float
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """`rope_type` and its parameters; empty = the default type."""
    tied: bool = False
    """Whether the output layer shares the weights of the embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the configuration."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Return the sizes in a parsed config.json. Raises RolloutConfigError for a model that the built-in forward cannot run."""
        family = str(raw.get("model_type"))
        reason = unsupported(raw)
        if reason is not None:
            raise RolloutConfigError(f"model config: {reason}; run it through transformers (TransformersDecoder)")
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        theta = float(rope.pop("rope_theta", raw.get("rope_theta", 10000.0)))
        heads = int(raw["num_attention_heads"])
        attention_bias = bool(raw.get("attention_bias", False))
        eos = raw.get("eos_token_id", DEFAULT_EOS.get(family))
        return cls(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or _default_head_dim(raw, family)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            rope_scaling=rope,
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else attention_bias,
            out_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family == "qwen3",
            eos_token_ids=token_ids(eos),
        )


def unsupported(raw: Mapping[str, Any]) -> str | None:
    """Return why the built-in forward cannot run the model of this config.json, None if it can."""
    family, activation = raw.get("model_type"), raw.get("hidden_act", "silu")
    if family not in FAMILIES:
        return f"model_type must be one of {', '.join(sorted(FAMILIES))}, got {family!r}"
    if activation != "silu":
        return f"hidden_act must be silu, got {activation!r}"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        return f"rope_type must be one of {', '.join(sorted(ROPE_TYPES))}, got {rope_type!r}"
    window = raw.get("sliding_window") if family == "mistral" else raw.get("use_sliding_window")
    if window or "sliding_attention" in (raw.get("layer_types") or ()):
        return "sliding-window attention is not run by the lean forward"
    if raw.get("quantization_config"):
        return "quantised weights are not run by the lean forward"
    return None


def _default_head_dim(raw: Mapping[str, Any], family: str) -> int:
    return 128 if family == "qwen3" else int(raw["hidden_size"]) // int(raw["num_attention_heads"])
