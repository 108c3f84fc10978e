"""`FusedAdamW` beside PyTorch's own: bit-equal weights and moments."""

import copy

import torch

from rl_core.actors.fsdp.optimizer import build_adamw, step_counters
from rl_core.actors.schedule import MOMENTS
from rl_core.api.optimizer import OptimizerSpec


def test_steps_are_bit_equal_to_those_of_pytorch_also_where_a_parameter_has_no_gradient():
    ours = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    theirs = copy.deepcopy(ours)
    spec = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, eps=1e-5)
    optimizer = build_adamw(ours, spec)
    groups = [
        {"params": [p for p in theirs.parameters() if (p.dim() > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]
    peer = torch.optim.AdamW(groups, lr=1e-2, betas=spec.betas, eps=1e-5, fused=True)
    for step in range(4):
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        if step == 2:
            ours[0].bias.grad = theirs[0].bias.grad = None
        for one in (optimizer, peer):
            for group in one.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            one.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
        assert all(torch.equal(optimizer.state[own][name], peer.state[other][name]) for name in MOMENTS)
    assert step_counters(ours, optimizer)["0.bias"] == 3 and step_counters(ours, optimizer)["2.weight"] == 4
