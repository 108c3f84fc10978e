"""The three workers, called by a program that knows no more than the names of their methods, train a step and evaluate."""

import asyncio
import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rl_core.actors.embodied import EmbodiedFSDPActor
from rl_core.api.errors import DataError, InfrastructureError
from rl_core.api.records import EnvOutput, Trajectory
from rl_core.channel import Channel
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.envs.worker import EnvWorker
from rl_core.messages.embodied import CollectionRequest
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


@pytest.fixture
def rollout(spec):
    made = MultiStepRolloutWorker(spec)
    made.init_worker()
    yield made
    asyncio.run(made.close())


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


def test_a_rollout_gives_up_its_device_and_the_collection_in_progress(rollout, monkeypatch):
    """A call with an older number than the last one is ignored."""
    moves, channel = [], Channel.create("silent", local=True)
    monkeypatch.setattr(rollout.model, "to", moves.append)

    async def main():
        collecting = asyncio.ensure_future(rollout.generate(channel, channel, channel))
        await asyncio.sleep(0)
        await rollout.occupy(["kv_cache"], 3)
        with pytest.raises(InfrastructureError, match="has given up the collection"):
            await asyncio.wait_for(collecting, 10)
        assert moves == ["cpu"]
        await rollout.occupy(["weights"], 2)
        assert moves == ["cpu"]
        await rollout.occupy(["kv_cache", "weights"], 4)
        await rollout.occupy(["kv_cache", "weights"], 4)
        assert moves == ["cpu", rollout.device]

    asyncio.run(main())


def test_an_output_can_be_read_as_a_dict_and_given_as_one(rollout):
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


@pytest.mark.parametrize("names", [("goal", "tasks", "robot"), ("robot", "goal", "tasks"), ("tasks", "robot", "goal")])
@pytest.mark.parametrize("kind", [dict, lambda output: EnvOutput(**output)])
def test_one_shard_is_merged_as_several_are(names, kind):
    """Its observations may be nested, lists, or None; its size is that of the first ones that are there."""
    obs = {"goal": None, "tasks": ["open", "close"], "robot": {"arm": {"joints": np.eye(2)}, "camera": None}}
    obs = {name: obs[name] for name in names}
    shard = {"obs": obs, "final_obs": obs, "dones": np.zeros((2, 1), bool), "final_info": []}
    merged = merge_env_outputs([kind(shard)], [2])
    several = merge_env_outputs([kind(shard), kind(shard)], [2, 2])
    for found, copies in ((merged, 1), (several, 2)):
        assert found.obs["goal"] is None and found.obs["robot"]["camera"] is None and found.final_info is None
        assert found.obs["tasks"] == ["open", "close"] * copies
        assert torch.equal(
            found.final_obs["robot"]["arm"]["joints"], torch.eye(2, dtype=torch.float64).repeat(copies, 1)
        )
    with pytest.raises(DataError, match="must send 3 observations, got 2"):
        merge_env_outputs([kind(shard)], [3])


@pytest.mark.parametrize("seeds", [5, [3, 4]])
def test_seeds_may_be_numbers_and_arrays_of_numpy(seeds):
    env = GymnasiumVectorEnv("CartPole-v1", 2)
    first, again = env.reset(seeds).obs["states"], env.reset(np.array(seeds)).obs["states"]
    assert np.array_equal(first, again) and not np.array_equal(first, env.reset().obs["states"])
    env.close()


def first_output(simulators=SIMULATORS):
    none = np.zeros((simulators, 1), bool)
    states = np.arange(4.0 * simulators, dtype=np.float32).reshape(simulators, 4)
    return {
        "obs": {"tasks": ["balance"] * simulators, "goal": None, "robot": {"pole": states}, "states": states},
        "dones": none,
        "terminations": none,
        "truncations": none,
    }


@pytest.mark.parametrize("kind", [dict, lambda output: EnvOutput(**output)])
@pytest.mark.parametrize(("mode", "other"), [("train", "eval"), ("eval", "train")])
def test_one_decision_is_made_with_the_default_keys_of_its_mode(spec, rollout, kind, mode, other):
    request = CollectionRequest.of_job(rollout.cfg, step=1, mode=mode)
    observations, actions = (Channel.create(name, local=True) for name in ("observations", "actions"))

    async def main():
        await observations.put_async(kind(first_output()), key=request.key(0, 0, 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rollout.recv_env_output(observations, other), 0.05)
        output = await rollout.recv_env_output(observations, mode)
        assert rollout.get_src_ranks(mode=mode) == rollout.get_dst_ranks(mode=mode) == [(0, SIMULATORS)]
        assert torch.equal(output["obs"]["states"], torch.from_numpy(first_output()["obs"]["states"]))
        chosen, result = rollout.predict(output["obs"], mode)
        assert chosen.shape == (SIMULATORS, 1) and result["prev_values"].shape == (SIMULATORS, 1)
        rollout.send_chunk_actions(actions, chosen, mode)
        assert np.array_equal(await actions.get_async(key=request.key(0, 0, 0), timeout=5), chosen.numpy())

    asyncio.run(main())


def test_an_output_with_other_fields_is_refused(rollout):
    with pytest.raises(DataError, match="must have the fields .*'obs', .* got .*'observations'"):
        rollout.get_dones_and_rewards({"observations": 1})


@pytest.mark.parametrize("kind", [dict, lambda fields: Trajectory(**fields)])
@pytest.mark.parametrize("key", ["none", "of a request"])
def test_a_trajectory_may_come_without_a_key_and_without_the_steps_that_were_made(spec, kind, key):
    actor = EmbodiedFSDPActor(
        spec | {"env": {**spec["env"], "options": {**spec["env"]["options"], "rolloutEpochs": 1}}}
    )
    sent = make_trajectory(list(range(SIMULATORS)), 1)
    names = {one.name for one in fields(Trajectory)} - {"sub_steps", "valid"}
    given = kind({name: getattr(sent, name) for name in names})
    keys = {"key": CollectionRequest.of_job(actor.cfg, step=1).trajectory_key(0)} if key == "of a request" else {}

    async def main():
        channel = Channel.create("trajectories", local=True)
        await channel.put_async(given, **keys)
        await asyncio.wait_for(actor.recv_rollout_trajectories(channel), 5)

    asyncio.run(main())
    got = actor.compute_advantages_and_returns()
    made = torch.full((HORIZON, SIMULATORS), sent.actions.shape[2])
    actor.load_trajectories([replace(sent, sub_steps=made, valid=torch.ones(HORIZON, SIMULATORS, dtype=torch.bool))])
    expected = actor.compute_advantages_and_returns()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    actor.close()
