"""`merge_trajectories`: trajectories that were recorded apart become one.

Legend: T decisions of a trajectory, B simulators, C actions of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.api.records import Trajectory

TIME_FIRST = ("actions", "prev_logprobs", "prev_values", "rewards", "dones", "sub_steps", "valid")


def merge_trajectories(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the trajectories as one, sorted by (sender, stage, part) and joined at the simulators.

    Raises DataError when one has another number of decisions or other inputs of the policy.
    """
    ordered = sorted(trajectories, key=lambda one: (one.sender, one.stage, one.part))
    first = ordered[0]
    if len(ordered) == 1:
        return first
    for one in ordered:
        if one.rewards.shape[0] != first.rewards.shape[0] or one.forward_inputs.keys() != first.forward_inputs.keys():
            raise DataError(
                f"trajectories of a step must have {first.rewards.shape[0]} decisions and inputs {sorted(first.forward_inputs)}, got "
                f"{one.rewards.shape[0]} and {sorted(one.forward_inputs)} from sender {one.sender}; all rollouts must run the same policy"
            )

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in ordered], dim=1)

    return Trajectory(
        **{name: joined(name) for name in (*TIME_FIRST, "terminations", "truncations")},
        forward_inputs={
            name: torch.cat([one.forward_inputs[name] for one in ordered], dim=1) for name in first.forward_inputs
        },
        env_ids=torch.cat([one.env_ids for one in ordered]),
        versions=first.versions,
        sender=first.sender,
        stage=first.stage,
        intervene_flags=_flags(ordered) if any(one.intervene_flags is not None for one in ordered) else None,
    )


def _flags(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return a mask, bool [T, B, C], of the actions that a person chose. It is false everywhere for a trajectory without such flags."""
    given = [(one.intervene_flags, one.rewards) for one in trajectories]
    return torch.cat([torch.zeros(r.shape, dtype=torch.bool) if flags is None else flags for flags, r in given], dim=1)
