"""A small policy that acts in simulators, and random trajectories for it; shared by tests of the embodied actor."""

import json
from pathlib import Path

import torch

from rl_core.api.records import Trajectory
from rl_core.policies.mlp import MLPPolicy

SIMULATORS, STEPS, STATES, ACTIONS = 4, 6, 3, 2


class Told(MLPPolicy):
    """An MLP that remembers which steps it was told of."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.told: list[int] = []

    def set_global_step(self, step):
        self.told.append(step)


def make_policy(folder: Path) -> Path:
    """Write the folder of the policy."""
    folder.mkdir()
    sizes = {"observation_size": STATES, "num_actions": ACTIONS, "hidden": [8, 8], "normalize": True}
    (folder / "config.json").write_text(json.dumps({"policy": f"{__name__}:Told", "arguments": sizes}))
    return folder


def make_embodied_spec(policy: Path, **actor) -> dict:
    """Return the job spec as a mapping."""
    return {
        "program": "embodied",
        "model": {"path": str(policy)},
        "data": {"train": "none"},
        "algorithm": {
            "name": "gae",
            "critic": {"gamma": 0.9, "lam": 0.8},
            "whiten": True,
            "steps": 10,
            "updateEpochs": 2,
            "loss": {"name": "ppo_clip", "clipLow": 0.2, "clipHigh": 0.2, "entropyCoefficient": 0.01},
        },
        "actor": {"optimizer": {"learningRate": 1e-2, "eps": 1e-5}, "gradClip": 0.5, **actor},
        "env": {"type": "gymnasium", "options": {"id": "CartPole-v1", "numEnvs": SIMULATORS, "horizon": STEPS}},
        "runtime": {"deadlines": {"collective": 20}},
    }


def make_trajectory(simulators: list[int], step: int) -> Trajectory:
    """Return a trajectory of a training step; each simulator's numbers follow from its number and the step."""
    columns = [_column(number, step) for number in [0, *simulators]]
    merged = {name: torch.cat([column[name] for column in columns], dim=1)[:, 1:] for name in columns[0]}
    dones = merged["dones"]
    return Trajectory(
        actions=merged["actions"],
        prev_logprobs=merged["prev_logprobs"],
        prev_values=merged["prev_values"],
        rewards=merged["rewards"],
        dones=dones,
        terminations=dones.clone(),
        truncations=torch.zeros_like(dones),
        forward_inputs={"states": merged["states"], "actions": merged["actions"]},
        sub_steps=torch.ones(STEPS, len(simulators), dtype=torch.int64),
        valid=merged["valid"],
        env_ids=torch.tensor(simulators),
        versions=torch.full((STEPS,), step - 1),
    )


def _column(number: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    dones = torch.rand(STEPS + 1, 1, 1, generator=generator) < 0.2
    dones[0] = False
    return {
        "states": normal(STEPS, 1, STATES),
        "actions": torch.randint(ACTIONS, (STEPS, 1, 1), generator=generator),
        "prev_logprobs": normal(STEPS, 1, 1, 1) * 0.1 - 0.7,
        "prev_values": normal(STEPS + 1, 1, 1),
        "rewards": normal(STEPS, 1, 1),
        "dones": dones,
        "valid": torch.rand(STEPS, 1, generator=generator) < 0.9,
    }
