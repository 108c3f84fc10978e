"""Routes, bootstraps and training rows against plain loops."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_core.actors.trajectories import prepare_rows
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.embodied import EmbodiedOptions
from rl_core.api.records import ChunkStepResult, EnvOutput
from rl_core.batching.trajectories import merge_trajectories
from rl_core.plan.routing import data_rank_of, routes, trajectory_parts
from rl_core.rollouts.embodied import bootstrap_rewards, cut_trajectory, merge_env_outputs
from rl_core.rollouts.recorder import TrajectoryRecorder


@pytest.mark.parametrize(("envs", "rollouts", "per_env"), itertools.product((1, 2, 3), (1, 2, 3), (3, 4, 7)))
def test_routes_serve_each_simulator_once_in_order(envs, rollouts, per_env):
    found = routes(per_env, env_workers=envs, rollouts=rollouts)
    assert all(route.size > 0 for route in found)
    assert [sum(r.size for r in found if r.env == env) for env in range(envs)] == [per_env] * envs
    sizes = [sum(r.size for r in found if r.rollout == rollout) for rollout in range(rollouts)]
    assert max(sizes) - min(sizes) <= 1
    assert found == sorted(found, key=lambda route: (route.rollout, route.env))


@pytest.mark.parametrize(("senders", "actors"), itertools.product(range(1, 7), range(1, 5)))
def test_each_data_rank_gets_equally_many_parts(senders, actors):
    parts = trajectory_parts(senders, actors)
    ranks = [
        data_rank_of(sender, part, senders=senders, actors=actors) for sender in range(senders) for part in range(parts)
    ]
    assert [ranks.count(rank) for rank in range(actors)] == [senders * parts // actors] * actors


@pytest.mark.parametrize("kind", ["standard", "always", "none"])
def test_bootstraps_are_added_where_the_rule_says(kind):
    ends = list(itertools.product((False, True), repeat=2))  # (terminated, truncated)
    terminations, truncations = (torch.tensor([[False, end[i]] for end in ends]) for i in (0, 1))
    values = torch.arange(4.0)[:, None] + 1
    rewards = torch.ones(4, 2)
    result = bootstrap_rewards(
        rewards,
        values,
        truncations,
        terminations | truncations,
        terminations=terminations,
        gamma=0.5,
        bootstrap_type=kind,
    )
    for row, (terminated, truncated) in enumerate(ends):
        added = {"standard": truncated and not terminated, "always": terminated or truncated, "none": False}[kind]
        assert result[row].tolist() == [1.0, 1.0 + (0.5 * (row + 1) if added else 0.0)]
    assert rewards.tolist() == [[1.0, 1.0]] * 4


def recorded(rng, steps, count, width):
    """Return a recorded trajectory of random episodes, and its plain numbers by simulator."""
    recorder = TrajectoryRecorder(sender=0, stage=0, auto_reset=True)
    plain = [[] for _ in range(count)]
    output = EnvOutput(obs={}, dones=torch.zeros(count, 1, dtype=torch.bool), env_ids=torch.arange(count))
    output.terminations, output.truncations = output.dones.clone(), output.dones.clone()
    recorder.observe(output, None)
    for _ in range(steps):
        values = torch.tensor(rng.normal(size=(count, 1)), dtype=torch.float32)
        recorder.decide(
            ChunkStepResult(
                actions=torch.zeros(count, width),
                prev_logprobs=torch.zeros(count, width, 1),
                prev_values=values,
                forward_inputs={"states": values},
            )
        )
        rewards = torch.tensor(rng.normal(size=(count, width)), dtype=torch.float32)
        made = torch.tensor(rng.integers(1, width + 1, count))
        done = torch.tensor(rng.random(count) < 0.3)
        lost = torch.tensor(rng.random(count) < 0.1)
        rewards = torch.where(torch.arange(width) < made[:, None], rewards, 0.0)
        dones = torch.zeros(count, width, dtype=torch.bool)
        dones[:, -1] = done | lost
        made = torch.where(lost, 0, made)
        recorder.observe(
            EnvOutput(obs={}, dones=dones, terminations=dones, truncations=dones, sub_steps=made, lost=lost), rewards
        )
        for row in range(count):
            plain[row].append(
                (float(values[row]), float(rewards[row].sum()), bool(dones[row, -1]), bool(lost[row]), int(made[row]))
            )
    last = torch.tensor(rng.normal(size=(count, 1)), dtype=torch.float32)
    recorder.end(last)
    return recorder.finish(), plain, last


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", ["chunk", "action"])
def test_rows_have_the_advantages_returns_and_masks_of_a_plain_loop(seed, level):
    rng = np.random.default_rng(seed)
    steps, count, width, gamma, lam = 12, 3, 3, 0.9, 0.8
    trajectory, plain, last = recorded(rng, steps, count, width)
    algorithm = AlgorithmSpec.model_validate({"name": "gae", "critic": {"gamma": gamma, "lam": lam}})
    options = EmbodiedOptions.model_validate({"id": "x", "chunk": width, "logProbLevel": level})
    prepared = prepare_rows(trajectory, algorithm, options)
    row = 0
    for simulator in range(count):
        episodes = plain[simulator]
        advantage, advantages = 0.0, [0.0] * steps
        for t in reversed(range(steps)):
            value, reward, done, _, _ = episodes[t]
            following = float(last[simulator]) if t == steps - 1 else episodes[t + 1][0]
            goes_on = 0.0 if done else 1.0
            advantage = reward + gamma * following * goes_on - value + gamma * lam * goes_on * advantage
            advantages[t] = advantage
        begun, valid = 0, [True] * steps
        for t, (_, _, done, lost, _) in enumerate(episodes):
            if lost:
                valid[begun : t + 1] = [False] * (t + 1 - begun)
            begun = t + 1 if done else begun
        for t, (value, _, _, _, made) in enumerate(episodes):
            mask = [valid[t] and action < made for action in range(width)]
            assert prepared.batch.loss_mask[row].tolist() == ([any(mask)] if level == "chunk" else mask)
            if any(mask):
                assert prepared.advantages[row, 0].item() == pytest.approx(advantages[t], abs=1e-5)
                assert prepared.returns[row, 0].item() == pytest.approx(advantages[t] + value, abs=1e-5)
            row += 1


def test_outputs_of_several_env_workers_are_merged_in_order_and_cut_again():
    shards = [
        EnvOutput(obs={"states": np.full((size, 2), size, np.float32)}, dones=np.zeros((size, 1), bool))
        for size in (2, 3)
    ]
    for shard in shards:
        shard.terminations = shard.truncations = shard.dones
    shards[1].final_obs = {"states": np.full((3, 2), 9, np.float32)}
    merged = merge_env_outputs(shards, [2, 3])
    assert merged.obs["states"][:, 0].tolist() == [2, 2, 3, 3, 3]
    assert merged.final_obs["states"][:, 0].tolist() == [2, 2, 9, 9, 9]
    assert merged.rewards is None
    for shard in shards:
        shard.rewards = np.ones((len(shard.dones), 4))
    shards[1].sub_steps = np.array([0, 1, 2])
    assert merge_env_outputs(shards, [2, 3]).sub_steps.tolist() == [4, 4, 0, 1, 2]
    trajectory, _, _ = recorded(np.random.default_rng(0), 4, 5, 1)
    parts = cut_trajectory(trajectory, 2)
    assert torch.equal(torch.cat([part.rewards for part in parts], dim=1), trajectory.rewards)
    assert [part.env_ids.tolist() for part in parts] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_what_a_person_did_is_kept_and_not_trained_as_the_policys(level):
    recorder, actions = TrajectoryRecorder(sender=0, stage=0, auto_reset=True), torch.ones(2, 3)
    none = torch.zeros(2, 3, dtype=torch.bool)
    person = torch.tensor([[False, True, False], [False, False, False]])
    ends = {"dones": none, "terminations": none, "truncations": none}
    recorder.observe(EnvOutput(obs={}, env_ids=torch.arange(2), **ends), None)
    for flags in (person, None):
        kept = {"actions": actions.clone()}
        recorder.decide(
            ChunkStepResult(
                actions=actions, prev_logprobs=torch.zeros(2, 3, 1), prev_values=torch.zeros(2, 1), forward_inputs=kept
            )
        )
        if flags is not None:
            recorder.intervene(torch.full((2, 3), 7.0), flags)
        recorder.observe(EnvOutput(obs={}, **ends), torch.ones(2, 3))
    alone = recorder.finish()
    other = replace(
        alone,
        sender=1,
        env_ids=alone.env_ids + 2,
        intervene_flags=None,
        actions=torch.ones(2, 2, 3),
        forward_inputs={"actions": torch.ones(2, 2, 3)},
    )
    helped = merge_trajectories([other, alone])
    assert helped.actions[0, 0].tolist() == helped.forward_inputs["actions"][0, 0].tolist() == [1.0, 7.0, 1.0]
    assert (helped.actions == 1).sum() == helped.actions.numel() - 1
    assert torch.equal(helped.intervene_flags[:, :2], torch.stack([person, none]))
    assert not helped.intervene_flags[:, 2:].any()
    algorithm = {"gae": {"critic": {}}, "grpo": {"groupSize": 2}}
    options = {"id": "x", "chunk": 3, "logProbLevel": level}
    for name, settings in algorithm.items():
        spec = AlgorithmSpec.model_validate({"name": name, **settings})
        given = EmbodiedOptions.model_validate(options | {"autoReset": name == "gae"})
        mask = prepare_rows(helped, spec, given).batch.loss_mask.reshape(4, 2, -1)
        first = {"chunk": [[False], [True]], "action": [[True, False, True], [True] * 3]}[level]
        # GRPO compares returns, and this one is not the policy's alone.
        assert mask[0].tolist() == (first if name == "gae" else torch.zeros_like(mask[0]).tolist())
        assert mask[1:].all()
