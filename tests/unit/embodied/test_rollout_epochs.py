"""A step of several rollout epochs: every transition is that of a plain loop, and each epoch counts as it would alone."""

import asyncio
import itertools
import math

import numpy as np
import pytest
import torch

from rl_core.actors.trajectories import prepare_rows
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.embodied import EmbodiedOptions, check_job
from rl_core.api.errors import ConfigError, DataError
from rl_core.batching.trajectories import fold_epochs, join_epochs, merge_trajectories
from rl_core.envs.embodied import train_seed
from tests.trajectory_samples import SIMULATORS, STEPS, make_trajectory
from tests.unit.embodied.simulators import Echo, picture
from tests.unit.embodied.test_collection import BATCHING, CHUNK, ENDS, GAMMA, HORIZON, PER_WORKER, World
from tests.unit.embodied.test_refused_fields import job
from tests.unit.embodied.test_shared_observations import Seeing

EPOCHS, DECISIONS = 2, HORIZON // CHUNK


class Plain:
    """One simulator of a job in a plain loop."""

    def __init__(self, number, auto_reset):
        self.number, self.auto_reset, self.env, self.obs = number, auto_reset, Echo(ENDS), None

    def begin(self):
        seed = train_seed(3 + 7919 * self.step + (self.epoch << 40), self.number, self.begun)
        self.obs, self.begun, self.resting = self.env.reset(seed=seed)[0], self.begun + 1, False

    def collect(self, step):
        """Return the epochs: (rows, last observation), a row being (observation, actions, rewards, column of the end, steps made)."""
        return [self.run_epoch(step, epoch) for epoch in range(EPOCHS)]

    def run_epoch(self, step, epoch):
        self.step, self.epoch, self.begun = step, epoch, 0
        if self.obs is None or not self.auto_reset:
            self.begin()
        return [self.decide() for _ in range(DECISIONS)], self.obs

    def decide(self):
        seen, rewards, end, made = self.obs, [0.0] * CHUNK, None, 0
        actions = [math.sin(float(seen.sum()) + index) for index in range(CHUNK)]
        for index, action in enumerate([] if self.resting else actions):
            self.obs, rewards[index], terminated, truncated, _ = self.env.step(action)
            made += 1
            if terminated or truncated:
                end = CHUNK - 1 if self.auto_reset else index
                if self.auto_reset:
                    rewards[-1] += GAMMA * (self.obs[1] / 2 + 1) if truncated else 0.0
                    self.begin()
                else:
                    self.resting = True
                break
        return seen, actions, rewards, CHUNK - 1 if self.resting and not made else end, made


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize(("envs", "stages", "batching"), itertools.product((1, 2), (1, 2), BATCHING))
def test_every_transition_is_that_of_a_plain_loop(envs, stages, batching, auto_reset):
    world = World(envs, 2, stages, batching=batching, rolloutEpochs=EPOCHS, autoReset=auto_reset)
    plain = [Plain(number, auto_reset) for number in range(envs * PER_WORKER)]

    async def check(step, actors, direct):
        received, stats = await world.collect(step, actors, direct)
        merged = merge_trajectories([part for parts in received for part in parts])
        assert merged.rewards.shape[0] == EPOCHS * DECISIONS
        assert merged.dones.shape[0] == merged.prev_values.shape[0] == EPOCHS * (DECISIONS + 1)
        assert sorted(merged.env_ids.tolist()) == list(range(len(plain)))
        made = 0
        for column, number in enumerate(merged.env_ids.tolist()):
            for epoch, (rows, last) in enumerate(plain[number].collect(step)):
                before = epoch * (DECISIONS + 1)
                assert not merged.dones[before, column].any()
                for decision, (seen, actions, rewards, end, steps) in enumerate(rows):
                    at = (epoch * DECISIONS + decision, column)
                    assert merged.forward_inputs["states"][at].tolist() == seen.tolist()
                    assert merged.actions[at].tolist() == pytest.approx(actions, abs=1e-4)
                    assert merged.rewards[at].tolist() == pytest.approx(rewards, abs=1e-4)
                    assert merged.prev_values[before + decision, column].item() == seen[1] / 2 + 1
                    assert merged.dones[before + decision + 1, column].tolist() == [c == end for c in range(CHUNK)]
                    assert merged.sub_steps[at] == steps and merged.valid[at]
                    made += steps
                assert merged.prev_values[before + DECISIONS, column].item() == last[1] / 2 + 1
        assert sum(one.steps for one in stats) == made

    async def both():
        await check(1, actors=1, direct=False)
        await check(2, actors=2, direct=True)

    asyncio.run(both())


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("vectorization", ["sync", "process"])
def test_images_in_shared_memory_are_those_of_their_states(vectorization, auto_reset):
    kind = {"id": "tests.unit.embodied.simulators:Picture", "vectorization": vectorization, "numEnvs": 2}
    world = World(1, 1, 2, rolloutEpochs=EPOCHS, autoReset=auto_reset, **kind)
    world.rollouts[0].model = Seeing()

    async def main():
        for step in (1, 2, 3):
            received, _ = await world.collect(step, 1, True)
            merged = merge_trajectories(received[0])
            states = merged.forward_inputs["states"]
            for at in np.ndindex(tuple(merged.rewards.shape[:2])):
                assert np.array_equal(merged.forward_inputs["pixels"][at], picture(states[at]))
            values = merged.prev_values.unflatten(0, (EPOCHS, -1))[:, :-1].flatten(0, 1)
            assert torch.equal(values[..., 0], states[..., 1] / 2 + 1)

    asyncio.run(main())


@pytest.mark.parametrize(("stages", "batching"), itertools.product((1, 2), BATCHING))
@pytest.mark.parametrize("auto_reset", [True, False])
def test_an_env_worker_that_is_lost_between_two_epochs_costs_the_later_one(stages, batching, auto_reset):
    world, lost = World(2, 1, stages, batching=batching, rolloutEpochs=EPOCHS, autoReset=auto_reset), 1
    worker = world.envs[lost]
    begin, begun = worker.prefetch_train_bootstrap, []

    def prefetch():
        begun.append(1)
        if len(begun) == 2:
            raise RuntimeError("killed")
        begin()

    worker.prefetch_train_bootstrap = prefetch
    interact = worker.interact

    async def ends(*arguments):
        with pytest.raises(RuntimeError, match="killed"):
            await interact(*arguments)

    worker.interact = ends

    async def main():
        received, _ = await world.collect(1, 1, True)
        merged = merge_trajectories(received[0])
        assert sorted(merged.env_ids.tolist()) == list(range(2 * PER_WORKER))
        options = EmbodiedOptions(id="x", chunk=CHUNK, rollout_epochs=EPOCHS, auto_reset=auto_reset)
        folded = fold_epochs(merged, EPOCHS)
        mask = prepare_rows(
            folded, AlgorithmSpec.model_validate({"name": "gae", "critic": {}}), options
        ).batch.loss_mask
        trained = mask.reshape(EPOCHS, 2 * PER_WORKER, DECISIONS).any(dim=2)
        mine = torch.tensor([number // PER_WORKER == lost for number in merged.env_ids.tolist()])
        assert trained[0].all() and trained[1].tolist() == (~mine).tolist()

    # One pair goes through the channels; the rollout learns of the loss when the other pair's connection ends.
    asyncio.run(main())


def epochs_of(group):
    """Return trajectories of two epochs whose episodes all have valid steps."""
    return [make_trajectory(list(range(SIMULATORS * group)), step) for step in (1, 2)]


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_advantages_of_an_epoch_are_those_that_it_has_alone(name):
    group = 2 if name == "grpo" else 1
    settings = {"gae": {"critic": {"gamma": 0.9, "lam": 0.8}}, "grpo": {"groupSize": group}}[name]
    algorithm = AlgorithmSpec.model_validate({"name": name, **settings})
    options = EmbodiedOptions(id="x", auto_reset=name == "gae", reward_filter=None if name == "gae" else (-1.0, 1e9))
    epochs = epochs_of(group)
    together = prepare_rows(fold_epochs(join_epochs(epochs), EPOCHS, group=group), algorithm, options)
    alone = [prepare_rows(epoch, algorithm, options) for epoch in epochs]
    mask = together.batch.loss_mask
    assert mask.any() and torch.equal(mask, torch.cat([one.batch.loss_mask for one in alone]))
    assert torch.allclose(together.advantages[mask], torch.cat([one.advantages for one in alone])[mask], atol=1e-6)
    if name == "gae":
        assert torch.allclose(together.returns, torch.cat([one.returns for one in alone]), atol=1e-6)
        assert torch.equal(together.values, torch.cat([one.values for one in alone]))
    for key in ("states", "actions"):
        assert torch.equal(together.inputs[key], torch.cat([one.inputs[key] for one in alone]))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_each_simulator_of_an_epoch_has_a_number_of_its_own_and_groups_stay_together(group):
    count, first = 2 * group, 6 * group
    parts = [
        join_epochs([make_trajectory(list(range(begin, begin + count)), 1)] * 3) for begin in (first, first + count)
    ]
    numbers = torch.cat([fold_epochs(part, 3, group=group).env_ids for part in parts])
    assert len(set(numbers.tolist())) == len(numbers) == 3 * 2 * count
    groups = (numbers // group).reshape(-1, group)
    assert (groups == groups[:, :1]).all() and len(set(groups[:, 0].tolist())) == len(groups)


def test_a_trajectory_of_another_number_of_epochs_is_refused():
    with pytest.raises(DataError, match="dones .* of 2 rollout epochs must have 8 rows .* got 7; correct sender 0"):
        fold_epochs(make_trajectory([0, 1], 1), 2)


def test_the_decisions_of_all_epochs_are_a_batch():
    def spec(epochs):
        options = {"id": "CartPole-v1", "numEnvs": 2, "horizon": STEPS, "rolloutEpochs": epochs}
        return job(algorithm={"name": "gae", "critic": {}, "optimizerStepsPerBatch": 24}, **{"env.options": options})

    check_job(spec(2))
    with pytest.raises(ConfigError, match="the 12 decisions of a step"):
        check_job(spec(1))
