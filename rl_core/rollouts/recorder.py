"""Gathers the decisions of one pipeline stage into a `Trajectory`.

Legend: B simulators, C actions of a chunk, T decisions.
"""

import torch
from torch import Tensor

from rl_core.api.records import ChunkStepResult, EnvOutput, Trajectory
from rl_core.rollouts.observation_rows import stacked


class TrajectoryRecorder:
    """The trajectory of one stage while it is generated. A step only appends to lists; `finish` computes."""

    def __init__(self, *, sender: int, stage: int, auto_reset: bool) -> None:
        """`sender` is the index of the rollout in the collection. Without `auto_reset` a simulator rests after its episode."""
        self._sender, self._stage, self._auto_reset = sender, stage, auto_reset
        self._steps: list[ChunkStepResult] = []
        self._rewards: list[Tensor] = []
        self._sub_steps: list[Tensor] = []
        self._lost_simulators: dict[int, Tensor] = {}
        """Decision -> [B]: simulators that were lost in it."""
        self._flags: list[Tensor | None] = []
        self._end_flags: list[tuple[Tensor, Tensor, Tensor]] = []
        self._env_ids: Tensor | None = None
        self._last_values: Tensor | None = None

    def observe(self, output: EnvOutput, rewards: Tensor | None) -> None:
        """Add what the simulators answered to the last decision; `rewards` [B, C] have bootstraps added, None before the first one."""
        is_first = not self._end_flags
        self._end_flags.append((output.dones, output.terminations, output.truncations))
        if rewards is None or is_first:
            self._env_ids = output.env_ids
            return
        if output.lost is not None:
            self._lost_simulators[len(self._rewards)] = output.lost
            rewards = rewards.masked_fill(output.lost[:, None], 0.0)  # The end of a lost episode is not bootstrapped.
        self._rewards.append(rewards)
        sub_steps = output.sub_steps
        self._sub_steps.append(torch.full((len(rewards),), rewards.shape[1]) if sub_steps is None else sub_steps)

    def decide(self, step: ChunkStepResult) -> None:
        """Add a decision."""
        self._steps.append(step)

    def intervene(self, actions: Tensor, flags: Tensor) -> None:
        """Put the actions of a person [B, C, ...] in place of the last ones, where `flags` [B, C] say so."""
        last_step, action_mask = self._steps[-1], flags.reshape(*flags.shape, *(1,) * (actions.dim() - 2))
        last_step.actions = torch.where(action_mask, actions.to(last_step.actions.dtype), last_step.actions)
        if "actions" in last_step.forward_inputs:
            last_step.forward_inputs["actions"] = last_step.actions
        self._flags += [None] * (len(self._steps) - len(self._flags))
        self._flags[-1] = flags

    def end(self, values: Tensor | None) -> None:
        """Set the values [B, 1] of the observations after the last chunk. `values` is None if the policy computes none."""
        self._last_values = values

    def finish(self) -> Trajectory:
        """Return the trajectory."""
        steps, rows = self._steps, len(self._rewards[0])
        zeros = torch.zeros(rows, 1)
        values = [zeros if step.prev_values is None else step.prev_values for step in steps]
        dones, terminations, truncations = (
            _ends(list(parts), self._rewards[0]) for parts in zip(*self._end_flags, strict=True)
        )
        if self._auto_reset:
            dones[0] = False  # The end of the previous episode belongs to the previous trajectory.
        flags = None
        if any(flag is not None for flag in self._flags):
            empty = torch.zeros(self._rewards[0].shape, dtype=torch.bool)
            padded = [*self._flags, *[None] * (len(steps) - len(self._flags))]
            flags = torch.stack([empty if flag is None else flag for flag in padded])
        return Trajectory(
            actions=torch.stack([step.actions for step in steps]),
            prev_logprobs=torch.stack([step.prev_logprobs for step in steps]),
            prev_values=torch.stack([*values, zeros if self._last_values is None else self._last_values]).float(),
            rewards=torch.stack(self._rewards),
            dones=dones,
            terminations=terminations,
            truncations=truncations,
            forward_inputs={
                name: stacked([step.forward_inputs[name] for step in steps]) for name in steps[0].forward_inputs
            },
            sub_steps=torch.stack(self._sub_steps),
            valid=self._valid(dones),
            env_ids=torch.arange(rows) if self._env_ids is None else self._env_ids,
            versions=torch.tensor([step.versions for step in steps]),
            sender=self._sender,
            stage=self._stage,
            intervene_flags=flags,
        )

    def _valid(self, dones: Tensor) -> Tensor:
        """Return [T, B] bool: the decisions of episodes that were not lost. `dones` is [T + 1, B, C]."""
        valid = torch.ones(len(self._rewards), dones.shape[1], dtype=torch.bool)
        episode_ends = dones[1:].any(dim=2)
        for decision, is_lost in self._lost_simulators.items():
            for row in is_lost.nonzero().flatten().tolist():
                earlier_ends = episode_ends[:decision, row].nonzero().flatten()
                start = int(earlier_ends[-1]) + 1 if len(earlier_ends) else 0
                valid[start : decision + 1, row] = False
        return valid


def _ends(parts: list[Tensor], rewards: Tensor) -> Tensor:
    """Return [T + 1, B, C] bool; the first row has one column, which becomes the last of C."""
    first_ends = torch.zeros(rewards.shape, dtype=torch.bool)
    first_ends[:, -1] = parts[0][:, -1]
    return torch.stack([first_ends, *parts[1:]])
