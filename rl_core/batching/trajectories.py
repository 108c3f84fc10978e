"""Trajectories that were recorded apart become one.

Legend: T decisions of a trajectory, E rollout epochs, N = T / E, B simulators, C actions of a chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.api.records import Trajectory

PER_DECISION = ("actions", "prev_logprobs", "rewards", "sub_steps", "valid")
PER_OBSERVATION = ("prev_values", "dones", "terminations", "truncations")
TIME_FIRST = (*PER_DECISION, *PER_OBSERVATION)
"""Fields [T, B, ...], and fields [T + 1, B, ...]."""


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

    return replace(_joined(ordered, dim=1), env_ids=torch.cat([one.env_ids for one in ordered]), part=0)


def trajectory_of(given: Trajectory | Mapping[str, Any]) -> Trajectory:
    """Return a trajectory that is given as such or as a mapping of its fields. Raises DataError for other fields."""
    if isinstance(given, Trajectory):
        return given
    try:
        return Trajectory(**given)
    except TypeError as error:
        raise DataError(
            f"a trajectory must have the fields of Trajectory, got {sorted(given)}: {error}; correct its sender"
        ) from error


def join_epochs(epochs: Sequence[Trajectory]) -> Trajectory:
    """Return the trajectories of the rollout epochs of the same simulators as one of E * N decisions and E * (N + 1) observations."""
    if len(epochs) == 1:
        return epochs[0]
    return replace(_joined(epochs, dim=0), versions=torch.cat([one.versions for one in epochs]))


def fold_epochs(trajectory: Trajectory, epochs: int, *, group: int = 1) -> Trajectory:
    """Return a trajectory of E = `epochs` as one of N decisions for E * B simulators, epoch by epoch.

    Each simulator of an epoch gets a number of its own; `group` consecutive numbers stay together. Raises DataError for a trajectory that
    does not have E * (N + 1) observations.
    """
    if epochs == 1:
        return trajectory
    decisions, observations = len(trajectory.rewards), len(trajectory.dones)
    if decisions % epochs or observations != decisions + epochs:
        raise DataError(
            f"a trajectory of {epochs} rollout epochs must have as many observations more than decisions, got {observations} and {decisions}"
        )

    def folded(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (epochs, -1)).transpose(0, 1).flatten(1, 2)

    flags, numbers = trajectory.intervene_flags, trajectory.env_ids
    numbers = numbers // group * group * epochs + torch.arange(epochs)[:, None] * group + numbers % group
    return replace(
        trajectory,
        **{name: folded(getattr(trajectory, name)) for name in TIME_FIRST},
        forward_inputs={name: folded(tensor) for name, tensor in trajectory.forward_inputs.items()},
        intervene_flags=None if flags is None else folded(flags),
        env_ids=numbers.flatten(),
        versions=trajectory.versions[: decisions // epochs],  # a collection has one version
    )


def _joined(trajectories: Sequence[Trajectory], dim: int) -> Trajectory:
    """Return the first trajectory with the time-first tensors of all, joined at `dim`."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), dim=dim)

    first, flags = trajectories[0], [one.intervene_flags for one in trajectories]
    if any(one is not None for one in flags):
        flags = [
            torch.zeros(one.rewards.shape, dtype=torch.bool) if given is None else given
            for one, given in zip(trajectories, flags, strict=True)
        ]
    return replace(
        first,
        **{name: joined([getattr(one, name) for one in trajectories]) for name in TIME_FIRST},
        forward_inputs={
            name: joined([one.forward_inputs[name] for one in trajectories]) for name in first.forward_inputs
        },
        intervene_flags=None if flags[0] is None else joined(flags),
    )
