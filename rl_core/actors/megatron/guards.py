"""Settings that the Megatron backend does not support; `rl_core.actors.guards` asks for them."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.api.job import RLJobSpec

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers `model` and `convert` know."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings with fixed frequencies."""
BIASED = ("Qwen2ForCausalLM",)
"""Architectures with a bias on query, key and value regardless of `attention_bias`."""


def unsupported_settings(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each setting of a job, or of its model's config.json, that the Megatron backend does not support."""
    yield from _of_dropout(spec, config)
    yield from _of_layout(spec, config)
    yield from _of_model(config)


def _of_dropout(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    if not spec.actor.dropout:
        return
    field, rate = "actor.dropout", config.get("attention_dropout")
    if spec.model.lora is None or not spec.model.lora.dropout:
        yield f"{field} must be false with actor.backend megatron, but for model.lora.dropout above 0, got true; remove it or choose fsdp2"
    if rate:
        yield f"{field} of attention needs actor.backend fsdp2, got megatron and attention_dropout {rate} of the model; choose fsdp2"
    if spec.algorithm.recompute_log_probs:
        yield (
            f"{field} must be false with algorithm.recomputeLogProbs, whose ratios it would fill with noise, got true; remove one of them"
        )


def _of_layout(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    parallel, heads = spec.actor.parallel, config.get("num_attention_heads")
    if parallel.sequence and parallel.tensor == 1:
        yield "actor.parallel.sequence has nothing to share with tensor 1, got true; remove it or raise tensor"
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        yield (
            f"actor.parallel.virtualPipeline needs pipeline above 1, got {parallel.virtual_pipeline}; remove it or raise pipeline"
        )
    runs = parallel.pipeline * (parallel.virtual_pipeline or 1)
    layers = config.get("num_hidden_layers")
    if layers and layers % runs:
        yield (
            f"actor.parallel.pipeline x virtualPipeline must divide the model's num_hidden_layers {layers}, got {runs}; choose a divisor"
        )
    counted = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config.get("intermediate_size"),
    }
    for name, count in counted.items():
        if count and count % parallel.tensor:
            yield f"actor.parallel.tensor must divide the model's {name} {count}, got {parallel.tensor}; choose a divisor"


def _of_model(config: Mapping[str, Any]) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    architecture = next(iter(config.get("architectures") or ()), "")
    if architecture not in ARCHITECTURES:
        yield (
            f"the architecture of the model must be one of {', '.join(ARCHITECTURES)} with actor.backend megatron, got {architecture}; "
            "choose fsdp2"
        )
        return
    settings = {
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "mlp_bias": (bool(config.get("mlp_bias")), (False,)),
        "use_sliding_window": (bool(config.get("use_sliding_window")), (False,)),
        "attention_bias": (bool(config.get("attention_bias")) and architecture not in BIASED, (False,)),
        "rope_type": (rope.get("rope_type") or rope.get("type") or "default", ROPE_TYPES),
    }
    for name, (value, allowed) in settings.items():
        if value not in allowed:
            yield (
                f"{name} of the model must be {' or '.join(map(str, allowed))} with actor.backend megatron, got {value}; choose fsdp2"
            )
