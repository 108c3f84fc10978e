"""Trajectories that were recorded apart become one.

Legend: T decisions of a trajectory, E rollout epochs, N = T / E, B simulators, C actions of a chunk.
"""

from collections.abc import Sequence
from dataclasses import replace

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

    Raises DataError with field and sender for a tensor of another shape than the rest, and for other inputs of the policy.
    """
    ordered = sorted(trajectories, key=lambda trajectory: (trajectory.sender, trajectory.stage, trajectory.part))
    first = ordered[0]
    for trajectory in ordered:
        _require_shapes(trajectory, first)
    if len(ordered) == 1:
        return first
    return replace(_joined(ordered, dim=1), env_ids=torch.cat([trajectory.env_ids for trajectory in ordered]), part=0)


def _require_shapes(trajectory: Trajectory, first: Trajectory) -> None:
    """Raise DataError unless a trajectory has the `forward_inputs` of `first`, and tensors of the same shapes but for the simulators."""
    if trajectory.forward_inputs.keys() != first.forward_inputs.keys():
        raise DataError(
            f"forward_inputs of the trajectory of sender {trajectory.sender} must be {sorted(first.forward_inputs)}, got "
            f"{sorted(trajectory.forward_inputs)}; all rollouts must run the same policy"
        )
    decisions, observations, simulators = len(first.rewards), len(first.dones), len(trajectory.env_ids)
    chunk = first.rewards.shape[2:3] if first.rewards.dim() == 3 else (1,)
    expected = {
        "rewards": (decisions, simulators, *chunk),
        "intervene_flags": (decisions, simulators, *chunk),
        "sub_steps": (decisions, simulators),
        "valid": (decisions, simulators),
        "actions": (decisions, simulators, *first.actions.shape[2:]),
        "prev_logprobs": (decisions, simulators, *first.prev_logprobs.shape[2:]),
        "prev_values": (observations, simulators, *first.prev_values.shape[2:]),
        **dict.fromkeys(("dones", "terminations", "truncations"), (observations, simulators, *chunk)),
        "versions": (decisions,),
    }
    tensors = {name: getattr(trajectory, name) for name in expected}
    for name, tensor in trajectory.forward_inputs.items():
        tensors[f"forward_inputs.{name}"] = tensor
        expected[f"forward_inputs.{name}"] = (decisions, simulators, *first.forward_inputs[name].shape[2:])
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != expected[name]:
            raise DataError(
                f"{name} of the trajectory of sender {trajectory.sender} must have the shape {expected[name]}, got {tuple(tensor.shape)}; "
                "all rollouts must run the same job"
            )


def require_each_once(trajectories: Sequence[Trajectory]) -> None:
    """Raise DataError if two trajectories have the same sender, stage and part."""
    keys: set[tuple[int, int, int]] = set()
    for trajectory in trajectories:
        key = (trajectory.sender, trajectory.stage, trajectory.part)
        if key in keys:
            raise DataError(
                f"sender, stage and part of each trajectory of a step must differ from those of the others, got {key} twice; sender "
                f"{trajectory.sender} must send each part once"
            )
        keys.add(key)


def join_epochs(epochs: Sequence[Trajectory]) -> Trajectory:
    """Return the trajectories of the rollout epochs of the same simulators as one of E * N decisions and E * (N + 1) observations."""
    if len(epochs) == 1:
        return epochs[0]
    return replace(_joined(epochs, dim=0), versions=torch.cat([epoch.versions for epoch in epochs]))


def fold_epochs(trajectory: Trajectory, epochs: int, *, group: int = 1) -> Trajectory:
    """Return a trajectory of E = `epochs` as one of N decisions for E * B simulators, epoch by epoch.

    Each simulator of an epoch gets a number of its own; `group` consecutive numbers stay together. Raises DataError for a trajectory that
    does not have E * (N + 1) observations.
    """
    decisions, observations = len(trajectory.rewards), len(trajectory.dones)
    if decisions % epochs or observations != decisions + epochs:
        raise DataError(
            f"dones of a trajectory of {epochs} rollout epochs must have {decisions + epochs} rows for {decisions} decisions, got {observations}; "
            f"correct sender {trajectory.sender}"
        )
    if epochs == 1:
        return trajectory

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

    first, flags = trajectories[0], [trajectory.intervene_flags for trajectory in trajectories]
    if any(tensor is not None for tensor in flags):
        flags = [
            torch.zeros(trajectory.rewards.shape, dtype=torch.bool) if tensor is None else tensor
            for trajectory, tensor in zip(trajectories, flags, strict=True)
        ]
    return replace(
        first,
        **{name: joined([getattr(trajectory, name) for trajectory in trajectories]) for name in TIME_FIRST},
        forward_inputs={
            name: joined([trajectory.forward_inputs[name] for trajectory in trajectories])
            for name in first.forward_inputs
        },
        intervene_flags=None if flags[0] is None else joined(flags),
    )
