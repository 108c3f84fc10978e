"""What may go wrong in a collection besides a lost process: weights in mid-collection, episodes without an end, policies without values."""

import asyncio

import numpy as np
import pytest
import torch

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.records import EnvOutput
from rl_core.channel import Channel
from rl_core.messages.embodied import CollectionRequest
from rl_core.rollouts.pausing_target import pausing
from tests.unit.embodied.test_collection import CHUNK, HORIZON, PER_WORKER, Sine, World, value


class Counting(Sine):
    """A policy that counts its training decisions, and calls `first` at the first one."""

    def __init__(self, first):
        self.first, self.made = first, 0

    def predict(self, obs, mode="train"):
        if mode == "train":
            self.made += 1
            if self.made == 1:
                self.first()
        return super().predict(obs, mode)


class Target:
    """A weight target that tells how many decisions had been made when it was asked to prepare."""

    def __init__(self):
        self.policy, self.prepared_after = None, None

    async def prepare(self, deadline):
        self.prepared_after = self.policy.made


def test_weights_that_arrive_in_mid_collection_are_loaded_after_its_end():
    world, target = World(1, 1, 1), Target()
    rollout = world.rollouts[0]

    async def main():
        loop, loads = asyncio.get_running_loop(), []
        arriving = pausing(target, rollout._pause)

        def arrive():
            for seconds in (60, 0):
                loads.append(asyncio.run_coroutine_threadsafe(arriving.prepare(seconds), loop))
                if not seconds:
                    with pytest.raises(DeadlineExceeded, match="a collection must end within 0 s"):
                        loads[-1].result(30)

        rollout.model = target.policy = Counting(arrive)
        received, _ = await world.collect(1, 1)
        await asyncio.wrap_future(loads[0])
        assert len(received[0][0].versions.unique()) == 1

    asyncio.run(main())
    assert target.prepared_after == HORIZON // CHUNK


@pytest.mark.parametrize("auto_reset", [True, False])
def test_an_episode_without_an_end_bounds_neither_a_collection_nor_an_evaluation(auto_reset):
    world = World(1, 1, 1, kwargs={"ends": [10**6]}, autoReset=auto_reset, evalHorizon=10)
    observations, actions, _ = world.channels

    async def main():
        received, _ = await world.collect(1, 1)
        trajectory = received[0][0]
        assert not trajectory.dones.any() and (trajectory.sub_steps == CHUNK).all()
        request = CollectionRequest(number=2, step=2, envs=(0,), rollouts=(0,), mode="eval", episodes=PER_WORKER)
        stats, _ = await asyncio.gather(
            world.envs[0].evaluate(actions, observations, request),
            world.rollouts[0].evaluate(observations, actions, request),
        )
        assert [episode["length"] for episode in stats.episodes] == [10] * PER_WORKER

    asyncio.run(main())


def test_a_policy_without_values_is_refused_where_the_algorithm_needs_them():
    world = World(1, 1, 1)

    class NoValues(Sine):
        def predict(self, obs, mode="train"):
            actions, result = super().predict(obs, mode)
            del result["prev_values"]
            return actions, result

    world.rollouts[0].model = NoValues()
    observations, actions, trajectories = world.channels

    async def main():
        request = CollectionRequest(number=1, step=1, envs=(0,), rollouts=(0,))
        working = asyncio.ensure_future(world.envs[0].interact(actions, observations, request))
        with pytest.raises(ConfigError, match="prev_values with algorithm.name gae.*value head"):
            await world.rollouts[0].generate(observations, actions, trajectories, request)
        working.cancel()
        await asyncio.wait({working})

    asyncio.run(main())


class Apart(Sine):
    """A policy that gives actions and values apart."""

    def predict(self, obs, mode="train"):
        raise AssertionError("act and values are called in place of predict")

    def act(self, obs, mode="train"):
        actions, result = super().predict(obs, mode)
        del result["prev_values"]
        return actions, result

    def values(self, obs):
        return value(obs["states"])


def test_actions_are_sent_before_the_values_are_computed():
    world, events = World(1, 1, 1), []
    rollout = world.rollouts[0]
    send = rollout.send_chunk_actions

    class Recording(Apart):
        act = Apart.act  # the class with `values` must have both

        def values(self, obs):
            events.append("values")
            return super().values(obs)

    def sent(*arguments, **options):
        events.append("sent")
        return send(*arguments, **options)

    rollout.model, rollout.send_chunk_actions = Recording(), sent
    asyncio.run(world.collect(1, 1))
    assert events.index("sent") < events.index("values") and events.count("sent") == HORIZON // CHUNK


def test_a_policy_with_act_and_values_chooses_no_actions_where_only_values_count():
    world = World(1, 1, 1)

    async def collected(model):
        world.rollouts[0].model = model
        received, _ = await world.collect(1, 1)
        return received[0][0]

    expected = asyncio.run(collected(Sine()))
    world = World(1, 1, 1)
    found = asyncio.run(collected(Apart()))
    assert expected.truncations.any()
    for name in ("actions", "rewards", "prev_values"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_an_evaluation_that_samples_gives_the_same_episodes_whatever_was_drawn_before():
    class Sampling(Sine):
        def predict(self, obs, mode="train"):
            actions, result = super().predict(obs, mode)
            return torch.randn_like(actions), result

    world = World(1, 1, 1, evalHorizon=10)
    world.rollouts[0].model = Sampling()
    observations, actions, _ = world.channels

    async def main():
        returns = []
        for number in (1, 2):
            torch.manual_seed(number)
            request = CollectionRequest(
                number=number, step=4, envs=(0,), rollouts=(0,), mode="eval", episodes=PER_WORKER
            )
            stats, _ = await asyncio.gather(
                world.envs[0].evaluate(actions, observations, request),
                world.rollouts[0].evaluate(observations, actions, request),
            )
            returns.append([episode["return"] for episode in stats.episodes])
        assert returns[0] == returns[1]

    asyncio.run(main())


def test_an_error_in_an_evaluation_ends_it_for_all_env_workers():
    """Otherwise those that wait for the observations of another env worker take those of the next evaluation with the same keys."""
    world = World(2, 1, 1)
    rollout, (observations, actions, _) = world.rollouts[0], world.channels
    request = CollectionRequest.of_job(rollout.cfg, step=1, mode="eval")
    seen, last = world.envs[0].bootstrap_step(0), EnvOutput(obs=None)

    class Broken(Sine):
        def predict(self, obs, mode="train"):
            raise ArithmeticError("broken")

    async def main():
        rollout.model = Broken()
        await observations.put_async(seen, key=request.key(0, 0, 0))
        with pytest.raises(ArithmeticError, match="broken"):
            await rollout.evaluate(observations, actions)
        rollout.model = Sine()
        for env, outputs in ((0, [last]), (1, [seen, last])):
            for output in outputs:
                await observations.put_async(output, key=request.key(0, env, 0))
        assert await asyncio.wait_for(rollout.evaluate(observations, actions), 60) == 1

    asyncio.run(main())


def test_a_message_may_take_as_long_as_the_collection(monkeypatch):
    """One that is requested early waits for a training and a weight sync before its first decision."""
    world, limits = World(1, 1, 1, runtime={"deadlines": {"rollout": 900, "groupMethod": 5000, "weightSync": 50}}), []
    get = Channel.get_async

    async def watched(self, key, timeout=None):
        limits.append(timeout)
        return await get(self, key=key, timeout=timeout)

    async def main():
        observations, actions, trajectories = world.channels
        request = CollectionRequest(number=1, step=1, envs=(0,), rollouts=(0,))
        await asyncio.gather(
            world.envs[0].interact(actions, observations, request),
            world.rollouts[0].generate(observations, actions, trajectories, request),
        )

    monkeypatch.setattr(Channel, "get_async", watched)
    asyncio.run(main())
    assert limits and set(limits) == {900 + 5000 + 50}


@pytest.mark.parametrize("fails", ["reset", "chunk_step"])
def test_after_a_failure_among_the_simulators_all_are_reset(fails, monkeypatch):
    """Some have made the actions or begun an episode, others have not, and the env worker does not know which."""
    worker = World(1, 1, 1).envs[0]
    (env,) = worker.envs

    def failing(*arguments):
        raise InfrastructureError("a simulator was not replaced in time")

    if fails == "chunk_step":
        worker.bootstrap_step(0)
    with monkeypatch.context() as patch, pytest.raises(InfrastructureError, match="not replaced in time"):
        patch.setattr(env, fails, failing)
        worker.bootstrap_step(0) if fails == "reset" else worker.env_interact_step(np.zeros((env.num_envs, 1)), 0)
    begun, reset = [], env.reset
    monkeypatch.setattr(env, "reset", lambda: begun.append(1) or reset())
    for _ in range(2):
        worker.bootstrap_step(0)
    assert begun == [1]
