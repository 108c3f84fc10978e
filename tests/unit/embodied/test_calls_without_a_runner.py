"""The three workers, called by a program that knows no more than the names of their methods, train a step and evaluate."""

import asyncio
import json

import numpy as np
import pytest
import torch

from rl_core.actors.embodied import EmbodiedFSDPActor
from rl_core.api.errors import DataError
from rl_core.api.records import EnvOutput
from rl_core.channel import Channel
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.envs.worker import EnvWorker
from rl_core.rollouts.embodied import merge_env_outputs
from rl_core.rollouts.hf import MultiStepRolloutWorker
from tests.trajectory_samples import make_trajectory

SIMULATORS, HORIZON, EPOCHS, EPISODES = 4, 6, 2, 3


@pytest.fixture
def spec(tmp_path):
    sizes = {"observation_size": 4, "num_actions": 2, "hidden": [8]}
    (tmp_path / "config.json").write_text(json.dumps({"policy": "mlp", "arguments": sizes}))
    options = {"id": "CartPole-v1", "numEnvs": SIMULATORS, "horizon": HORIZON, "rolloutEpochs": EPOCHS}
    return {
        "program": "embodied",
        "model": {"path": str(tmp_path)},
        "data": {"train": "none"},
        "algorithm": {"name": "gae", "critic": {"gamma": 0.9}, "optimizerStepsPerBatch": 3},
        "env": {"type": "gymnasium", "options": {**options, "vectorization": "sync", "evalEpisodes": EPISODES}},
    }


def test_a_step_and_an_evaluation(spec):
    env, rollout, actor = EnvWorker(spec), MultiStepRolloutWorker(spec), EmbodiedFSDPActor(spec)
    channels = [Channel.create(name, local=True) for name in ("env", "rollout", "actor")]
    observations, actions, trajectories = channels

    async def main():
        for worker in (env, rollout, actor):
            worker.init_worker()
        for step in (1, 2, 3):
            actor.set_global_step(step - 1)
            rollout.set_global_step(step - 1)
            stats, decisions, nothing = await asyncio.gather(
                env.interact(actions, observations),
                rollout.generate(observations, actions, trajectories),
                actor.recv_rollout_trajectories(trajectories),
            )
            assert stats.steps == SIMULATORS * HORIZON * EPOCHS and decisions == HORIZON * EPOCHS and nothing is None
            found = actor.compute_advantages_and_returns()
            assert found["advantages"].shape == found["returns"].shape == (EPOCHS * SIMULATORS, HORIZON)
            metrics = actor.run_training()
            assert metrics["actor/grad_norm"] > 0
            actor.sync_model_to_rollout()
            stats, _ = await asyncio.wait_for(
                asyncio.gather(env.evaluate(actions, observations), rollout.evaluate(observations, actions)), 60
            )
            assert len(stats.episodes) == EPISODES
        with pytest.raises(DataError, match=f"must have the {EPOCHS * HORIZON} decisions of env.options.* got 6"):
            actor.load_trajectories([make_trajectory([0], 1)])
        await rollout.close()

    asyncio.run(main())
    env.close()
    actor.close()


def test_an_output_can_be_read_as_a_dict_and_given_as_one(spec):
    rollout = MultiStepRolloutWorker(spec)
    none = torch.zeros(2, 1, dtype=torch.bool)
    output = EnvOutput(obs={"states": np.zeros((2, 4))}, dones=none, terminations=none, truncations=none)
    assert output["dones"] is none and output.get("rewards") is None and output.get("nothing", 3) == 3
    assert "obs" in output and "nothing" not in output and dict(output)["obs"] is output.obs
    with pytest.raises(KeyError, match="nothing"):
        output["nothing"]
    dones, rewards = rollout.get_dones_and_rewards(dict(output))
    assert torch.equal(dones, none) and rewards is None
    transposed = torch.arange(6.0).reshape(3, 2).T
    given = {**output, "dones": torch.zeros(3, 2, dtype=torch.bool).T, "rewards": transposed}
    dones, rewards = rollout.get_dones_and_rewards(given)
    assert dones.is_contiguous() and rewards.is_contiguous() and torch.equal(rewards, transposed)


def test_lists_among_observations_are_joined():
    shards = [
        EnvOutput(obs={"states": torch.zeros(len(texts), 1), "tasks": texts, "goal": None})
        for texts in (["open"], ["close", "reach"])
    ]
    assert merge_env_outputs(shards, [1, 2]).obs["tasks"] == ["open", "close", "reach"]
    assert merge_env_outputs(shards, [1, 2]).obs["goal"] is None


@pytest.mark.parametrize("seeds", [5, [3, 4]])
def test_seeds_may_be_numbers_and_arrays_of_numpy(seeds):
    env = GymnasiumVectorEnv("CartPole-v1", 2)
    first, again = env.reset(seeds).obs["states"], env.reset(np.array(seeds)).obs["states"]
    assert np.array_equal(first, again) and not np.array_equal(first, env.reset().obs["states"])
    env.close()
