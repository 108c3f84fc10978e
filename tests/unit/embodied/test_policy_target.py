"""`PolicyWeightTarget` beside the state dict of the policy into which it writes."""

import pytest
import torch

from rl_core.policies.mlp import MLPPolicy
from rl_core.rollouts.policy_target import PolicyWeightTarget, saved_tensors


def make_policy(seed):
    torch.manual_seed(seed)
    return MLPPolicy(observation_size=3, num_actions=2, hidden=[4], normalize=True)


def move(model):
    """Give each tensor other memory, as a move to another device and back does."""
    model._apply(torch.clone)


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_reach_a_policy_that_was_moved(in_place):
    policy, trained = make_policy(1), make_policy(2)
    trained.mean.fill_(3.0)
    target = PolicyWeightTarget(lambda: saved_tensors(policy))
    move(policy)
    weights = saved_tensors(trained)
    if in_place:
        for name, destination in target.destinations().items():
            destination.copy_(weights.pop(name))
        assert not weights
    target.load(iter(weights.items()), 1)
    written = policy.state_dict()
    assert written.keys() == trained.state_dict().keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in trained.state_dict().items())
    assert target.names_and_shapes().keys() == written.keys()
