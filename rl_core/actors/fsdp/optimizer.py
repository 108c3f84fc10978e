"""AdamW over the parameters of a wrapped model, with its state there from the start so that checkpoints load into it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rl_core.actors.schedule import MOMENTS, LRSchedule
from rl_core.api.roles import OptimizerSpec


def build_adamw(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """Return AdamW in two groups: matrices with weight decay, 1-D parameters without. Zero moments, step 0."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = spec.betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=(beta1, beta2),
        eps=spec.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS},
        }
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, schedule: LRSchedule) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scheduler that applies `schedule` to every group; its argument is the number of applied steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step) / schedule.peak)


def replace_schedule(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    schedule: LRSchedule,
    *,
    applied: int,
) -> None:
    """Let `scheduler` follow `schedule` from here on, after `applied` optimizer steps."""
    scheduler.base_lrs = [schedule.peak for _ in optimizer.param_groups]
    scheduler.lr_lambdas = [lambda step: schedule(step) / schedule.peak for _ in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = schedule.peak, schedule(applied)
    scheduler._last_lr = [schedule(applied) for _ in optimizer.param_groups]


def resume_schedule(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, *, applied: int
) -> None:
    """Have `scheduler` stand where it stood after `applied` optimizer steps."""
    scheduler.last_epoch = applied
    rates = [base * factor(applied) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return `<parameter>.<moment>` -> tensor for every parameter in training."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def step_counters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return parameter name -> its number of AdamW steps."""
    return {
        name: float(optimizer.state[parameter]["step"])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def set_step_counters(model: nn.Module, optimizer: torch.optim.Optimizer, counters: Mapping[str, float]) -> None:
    """Give each parameter its own number of AdamW steps."""
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            optimizer.state[parameter]["step"].fill_(counters[name])
