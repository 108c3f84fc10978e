"""AdamW over the parameters of a wrapped model. Its state is allocated from the start, so that checkpoints can be loaded into it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rl_core.actors.critic import is_critic_name
from rl_core.actors.hf import named_parameters
from rl_core.actors.schedule import CRITIC, MOMENTS, LRSchedule, peak_rate
from rl_core.api.optimizer import OptimizerSpec


class FusedAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """`torch.optim.AdamW` with `fused=True`, for groups whose parameters have one type and one device.

    The numbers are the same. With small models the general `step` of PyTorch takes several times as long as the kernel.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient. There is no `closure`."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            states = [self.state[parameter] for parameter in trained]
            counters = [state["step"] for state in states]
            beta1, beta2 = group["betas"]
            torch._foreach_add_(counters, 1)
            torch._fused_adamw_(
                trained,
                [parameter.grad for parameter in trained],
                *([state[moment] for state in states] for moment in MOMENTS),
                [],
                counters,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def build_adamw(
    model: nn.Module, spec: OptimizerSpec, dims: Callable[[nn.Parameter], int] = Tensor.dim
) -> torch.optim.AdamW:
    """Return AdamW over the parameters that are not frozen, with moments of zero.

    Parameter groups are, in order: matrices of the policy (with weight decay), its 1-D parameters (without), and the same two of the
    critic. Without weight decay policy and critic are one group each. `dims` returns the number of dimensions of a whole parameter, of
    which the model may store a 1-D part.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in named]
    groups = [
        {
            "params": [p for name, p in named if is_critic_name(name) is critic and (dims(p) > 1) in matrices],
            "weight_decay": spec.weight_decay if True in matrices else 0.0,
            "lr": peak_rate(spec, critic=critic),
            CRITIC: critic,
        }
        for critic in (False, True)
        for matrices in ([(True,), (False,)] if spec.weight_decay else [(True, False)])
    ]
    beta1, beta2 = spec.betas
    optimizer = FusedAdamW(
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
    """Return the scheduler that applies `schedule` to every group. Its step counter is the number of applied optimizer steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step) / schedule.peak)


def replace_schedule(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    schedule: LRSchedule,
    spec: OptimizerSpec,
    *,
    applied: int,
) -> None:
    """Make `scheduler` follow `schedule` with the peak learning rates of `spec`, after `applied` optimizer steps."""
    scheduler.base_lrs = [peak_rate(spec, critic=group[CRITIC]) for group in optimizer.param_groups]
    scheduler.lr_lambdas = [lambda step: schedule(step) / schedule.peak for _ in optimizer.param_groups]
    for group, peak in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["initial_lr"] = peak
    resume_schedule(optimizer, scheduler, applied=applied)


def resume_schedule(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, *, applied: int
) -> None:
    """Set `scheduler` to its state after `applied` optimizer steps."""
    scheduler.last_epoch = applied
    rates = [base * factor(applied) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def step_counters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the number of AdamW steps of each parameter, by name."""
    return {
        name: float(optimizer.state[parameter]["step"])
        for name, parameter in named_parameters(model).items()
        if parameter in optimizer.state
    }


def set_step_counters(model: nn.Module, optimizer: torch.optim.Optimizer, counters: Mapping[str, float]) -> None:
    """Set the number of AdamW steps of each parameter, by name."""
    for name, parameter in named_parameters(model).items():
        if parameter in optimizer.state:
            optimizer.state[parameter]["step"].fill_(counters[name])
