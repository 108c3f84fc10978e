"""megatron-core's AdamW over the pipeline stages of a rank, and the part of each parameter that it updates on this rank.

With several data ranks and `actor.optimizer.distributed`, megatron's distributed optimizer is used: the parameters of a stage form one
contiguous buffer, and each data rank updates an equal range of it. A rank stores moments, and in half precision float32 copies, of its
range only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.critic import is_critic_name
from rl_core.actors.megatron import library
from rl_core.actors.schedule import CRITIC, MOMENTS
from rl_core.api.roles import ActorSpec


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """The part of a parameter that this rank updates: the whole parameter, or a range of its elements."""

    values: Tensor
    """float32; the parameter itself or its float32 copy. A range has the shape [n]."""
    start: int
    """Row-major index of the first element in the parameter."""
    state: dict[str, Tensor]
    """AdamW's moments, in the shape of `values`, and its counter `step`, on their device as the fused kernel needs it."""


def build_optimizer(
    actor: ActorSpec, stages: Sequence[Any], *, dtype: torch.dtype, distributed: bool
) -> "library.MegatronOptimizer":
    """Return AdamW over the wrapped `stages`. `distributed` says that they are wrapped for the distributed optimizer. Collective."""
    spec = actor.optimizer
    beta1, beta2 = spec.betas
    config = library.OptimizerConfig(
        optimizer="adam",
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=spec.eps,
        clip_grad=actor.grad_clip or 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    critic_parameters = library.ParamWithNamePredicate(name=CRITIC, fn=lambda _, name: is_critic_name(name))
    groups = library.get_standard_config_overrides(config) | {
        library.ParamKey(with_name_predicate=critic_parameters): {CRITIC: True}
    }
    # The ranges of float32 parameters are views of them. If they were created with gradients enabled, reading their `grad` would warn.
    with torch.no_grad():
        optimizer = library.get_megatron_optimizer(config, stages, groups, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # megatron's constructor leaves the choice to torch, which takes for-each kernels with temporaries of 4 bytes per parameter.
        group["fused"], group["foreach"] = True, False
        # megatron leaves the product to a scheduler of its own, which is not used here.
        group["weight_decay"] = spec.weight_decay * group["wd_mult"]
    return optimizer


def open_shards(optimizer: "library.MegatronOptimizer", parameters: Mapping[str, Any]) -> dict[str, OptimizerShard]:
    """Return this rank's shards of the named `parameters`, with moments of zero. Parameters without a shard on this rank are left out."""
    (chained,) = optimizer.chained_optimizers
    shards = {}
    for name, parameter in parameters.items():
        values, start = getattr(parameter, "main_param", parameter), 0
        if isinstance(chained, library.DistributedOptimizer):
            if parameter not in chained.model_param_group_index_map:
                continue
            group, index = chained.model_param_group_index_map[parameter]
            values = chained.optimizer.param_groups[group]["params"][index]
            start = chained._get_model_param_range_map(parameter)["param"].start
        state = chained.optimizer.state[values]
        # Each parameter has a counter of its own. A shared one would be incremented once per parameter.
        state.update(
            step=torch.zeros((), dtype=torch.float32, device=values.device),
            **{moment: torch.zeros_like(values) for moment in MOMENTS},
        )
        shards[name] = OptimizerShard(values, start, state)
    return shards


def gradient_norm(optimizer: "library.MegatronOptimizer", values: Iterable[Tensor]) -> float:
    """Return the norm of the gradients of `values`, which are those of shards, over all ranks.

    Collective; some ranks may have none of them.

    A parameter that several ranks store counts once.
    """
    (chained,) = optimizer.chained_optimizers
    grads = [
        tensor.grad
        for tensor in values
        if tensor.grad is not None
        and library.param_is_not_shared(tensor)
        and library.param_is_not_tensor_parallel_duplicate(tensor)
    ]
    norm = library.get_grad_norm_fp32(grads, grad_stats_parallel_group=chained.get_grad_stats_parallel_group())
    return float(norm)
