"""The device on which a training process computes: which one, how its memory is allocated, and whether the model fits."""

import os
from collections.abc import Mapping

import torch

from rl_core.api.embodied import is_embodied
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.plan.capacity import ModelFacts, admit, estimate


def compute_device(cfg: RLJobSpec, rank: int) -> torch.device:
    """Choose the device on which a rank trains, make it the current one, set its allocator, and return it.

    Raises ConfigError when accelerators are requested and none is visible, and CapacityError when its memory is too small.
    """
    if not cfg.actor.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"actor.gpus asks for {cfg.actor.gpus} accelerators, got none visible; run on such a machine or set it to 0"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if settings := allocator_settings(cfg, os.environ):
        torch._C._accelerator_setAllocatorSettings(settings)
    check_memory(cfg, int(torch.cuda.get_device_properties(device).total_memory))
    return device


def allocator_settings(cfg: RLJobSpec, environ: Mapping[str, str]) -> str | None:
    """Return the settings of torch's CUDA allocator, which must be set before the first allocation; None = leave those of the environment.

    Expandable segments grow in place, so that micro-batches of changing sizes leave no memory between blocks that none of them fits. Where
    rollouts share the device they are off: weights are handed over by CUDA IPC, which maps ordinary segments into another process without
    further rights.
    """
    is_configured = any(name in environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return None if is_configured or cfg.placement.mode != "disaggregated" else "expandable_segments:True"


def check_memory(cfg: RLJobSpec, available: int) -> None:
    """Raise CapacityError if one trainer process needs more device memory than `available` bytes.

    The need is estimated from the job and the model's configuration, before anything is allocated. That of a policy that acts in simulators is
    not: only its class knows its size.
    """
    if is_embodied(cfg):
        return
    admit(estimate(cfg, ModelFacts.from_config(cfg.model.path), device_memory=available), "actor")
