"""Settings that a trainer does not support with its backend, device or model. `rljob validate` refuses them, and so does each actor.

The module needs neither torch nor megatron-core.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.actors.megatron import guards as megatron
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.lora import absent_layers
from rl_core.plan.model_facts import num_experts


def unsupported_settings(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each setting of a job, or of its model's config.json, that the trainer does not support."""
    yield from _of_flash_attention(spec, config)
    yield from _of_compile(spec)
    yield from _of_reference(spec)
    yield from _of_experts(spec, config)
    if layers := config.get("num_hidden_layers"):
        yield from absent_layers(spec.model.lora, layers=layers)
    if spec.actor.backend == "megatron":
        yield from megatron.unsupported_settings(spec, config)


def check(spec: RLJobSpec, config: Mapping[str, Any]) -> None:
    """Raise ConfigError listing the unsupported settings, if there are any."""
    if problems := list(unsupported_settings(spec, config)):
        raise ConfigError("; ".join(problems))


def is_flash_head_size(size: int) -> bool:
    """Return whether flash attention has a kernel for heads of `size`."""
    return size % 8 == 0 and size <= 256


def _of_compile(spec: RLJobSpec) -> Iterator[str]:
    actor = spec.actor
    reasons = {"megatron": "whose schedules call the layers", "fsdp1": "which holds a layer's parameters as one tensor"}
    if actor.compile and actor.backend in reasons:
        yield f"actor.compile needs backend fsdp2, got {actor.backend}, {reasons[actor.backend]}; choose fsdp2 or remove compile"
    if actor.compile and actor.gradient_checkpointing_mode == "selective":
        yield (
            "actor.gradientCheckpointingMode must be full with actor.compile, whose layers do not show their single operations, got selective; "
            "remove one"
        )


def _of_reference(spec: RLJobSpec) -> Iterator[str]:
    field, interval = "algorithm.referenceUpdateSteps", spec.algorithm.reference_update_steps
    if interval is not None and not spec.algorithm.needs_reference:
        yield f"{field} needs algorithm.loss.klCoefficient or rewardKlCoefficient above 0, got {interval} without; set one or remove it"
    if interval is not None and spec.model.lora is not None:
        yield f"{field} must be null with model.lora, whose reference policy is the model without adapters, got {interval}; remove one"


def _of_experts(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    experts = num_experts(config)
    if experts and spec.model.lora is not None:
        yield (
            f"model.lora must be null for a mixture of experts, whose experts have no adapters, got {experts} experts; remove it, or choose a "
            "dense model"
        )
    if experts and spec.actor.compile:
        yield (
            f"actor.compile must be false for a mixture of experts, as torch.compile does not take the product over experts, got {experts} "
            "experts; remove it"
        )


def _of_flash_attention(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    if spec.actor.attention != "flash_attention_2":
        return
    field = "actor.attention flash_attention_2"
    if not spec.actor.gpus:
        yield f"{field} runs on GPUs only, got actor.gpus 0; write sdpa or remove it"
    if spec.model.dtype != "bfloat16":
        yield f"{field} needs model.dtype bfloat16, got {spec.model.dtype}; write sdpa or bfloat16"
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("head_dim") or (hidden // heads if hidden and heads else 8)
    if not is_flash_head_size(size):
        yield f"{field} needs a head size divisible by 8 and at most 256, got {size} of the model; write sdpa"
    if spec.actor.dropout and config.get("attention_dropout"):
        yield (
            f"{field} has no dropout, got actor.dropout true and attention_dropout {config['attention_dropout']} of the model; write sdpa or "
            "remove dropout"
        )
