"""Whole collections of env workers and rollouts in one process: every transition is that of a plain loop, and arrives once."""

import asyncio
import itertools
import math
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import EnvOutput
from rl_core.batching.trajectories import merge_trajectories
from rl_core.channel import Channel
from rl_core.channel.direct import from_arrays, to_arrays
from rl_core.envs.embodied import train_seed
from rl_core.envs.worker import EnvWorker
from rl_core.messages.embodied import CollectionRequest
from rl_core.rollouts.hf import MultiStepRolloutWorker
from rl_core.transports.direct import Connection
from rl_core.weights.receiver_state import ReceiverState
from tests.unit.embodied.simulators import Echo
from tests.unit.embodied.workers import workers

ENDS, CHUNK, HORIZON, PER_WORKER, GAMMA = (3, -4, -7, 5), 2, 8, 6, 0.9


class Sine:
    """A policy whose actions, log-probabilities and values follow from the observation."""

    def predict(self, obs, mode="train"):
        states = obs["states"]
        actions = torch.sin(states.sum(1, keepdim=True) + torch.arange(CHUNK))
        kept = {"states": states, "actions": actions}
        return actions, {
            "prev_logprobs": actions[..., None] / 10,
            "prev_values": value(states),
            "forward_inputs": kept,
        }


def value(states):
    return states[:, 1:] / 2 + 1


def job(envs, rollouts, stages, *, runtime=None, **options):
    return RLJobSpec.model_validate(
        {
            "program": "embodied",
            "model": {"path": "none"},
            "data": {"train": "none"},
            "algorithm": {"name": "gae", "seed": 3, "critic": {"gamma": GAMMA, "lam": 0.95}},
            "rollout": {"replicas": rollouts},
            "runtime": runtime or {},
            "env": {
                "type": "gymnasium",
                "replicas": envs,
                "options": {
                    "id": "tests.unit.embodied.simulators:Echo",
                    "kwargs": {"ends": list(ENDS)},
                    "numEnvs": PER_WORKER,
                    "horizon": HORIZON,
                    "chunk": CHUNK,
                    "stages": stages,
                    "vectorization": "sync",
                    **options,
                },
            },
        }
    )


class World:
    """Env workers, rollouts and channels in this process."""

    def __init__(self, envs, rollouts, stages, **options):
        spec = job(envs, rollouts, stages, **options)
        self.envs = workers(EnvWorker, "env", envs, spec)
        self.rollouts = workers(MultiStepRolloutWorker, "rollout", rollouts, spec)
        for rollout in self.rollouts:
            rollout.model = Sine()
        self.channels = [Channel.create(name, local=True) for name in ("observations", "actions", "trajectories")]
        self.senders = rollouts * stages

    async def collect(self, step, actors, direct=False, lose=None):
        """Return the trajectories of each data rank, and the statistics of the env workers.

        `direct`: all pairs but the first exchange their messages by direct connections, not by channels.
        `lose` is (place of an env worker that ends, number of decisions that it makes before, whether it hangs and is given up).
        The rollouts learn of the end of a direct connection themselves.
        """
        observations, actions, trajectories = self.channels
        addresses = [await env.direct_address() for env in self.envs]
        pairs = [(env, rollout) for env in range(len(self.envs)) for rollout in range(len(self.rollouts))]
        request = CollectionRequest(
            number=step,
            step=step,
            envs=tuple(range(len(self.envs))),
            rollouts=tuple(range(len(self.rollouts))),
            actors=actors,
            direct=tuple((*pair, addresses[pair[0]]) for pair in pairs[len(pairs) > 1 :] if direct),
        )
        if lose is not None:
            self.envs[lose[0]] = Ending(self.envs[lose[0]], self, request, *lose)
        stats = await asyncio.gather(
            *(env.interact(actions, observations, request) for env in self.envs),
            *(rollout.generate(observations, actions, trajectories, request) for rollout in self.rollouts),
        )
        each = math.lcm(self.senders, actors) // actors
        received = [
            [await trajectories.get_async(key=request.trajectory_key(rank), timeout=5) for _ in range(each)]
            for rank in range(actors)
        ]
        return received, stats[: len(self.envs)]


class Ending:
    """An env worker that ends in the middle of a collection; the runner tells the rollouts."""

    def __init__(self, env, world, request, place, decisions, hangs=False):
        self.env, self.world, self.request, self.place, self.decisions = env, world, request, place, decisions
        self.hangs, self.tells = hangs, not request.direct or hangs

    async def interact(self, actions, observations, request):
        made, step = 0, self.env.env_interact_step
        ended, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def counted(chosen, stage):
            nonlocal made
            if made == self.decisions:
                loop.call_soon_threadsafe(ended.set)
                if self.hangs:
                    release.wait(30)
                raise RuntimeError("killed")
            made += 1
            return step(chosen, stage)

        self.env.env_interact_step = counted
        work = asyncio.ensure_future(self.env.interact(actions, observations, request))
        await ended.wait()
        if not self.hangs:
            await asyncio.wait({work})
            assert isinstance(work.exception(), RuntimeError)
        for rollout in range(len(self.world.rollouts)):
            for stage in range(self.env.options.stages):
                if self.tells:
                    await observations.put_async(EnvOutput(obs=None), key=request.key(stage, self.place, rollout))
        self.release = release


class PlainSimulator:
    """The same episodes in a plain loop: one simulator, one decision after the other."""

    def __init__(self, number):
        self.number, self.step, self.begun = number, 1, 0
        self.begin()

    def begin(self):
        self.env = Echo(ENDS)
        self.obs, _ = self.env.reset(seed=train_seed(3 + 7919 * self.step, self.number, self.begun))
        self.begun += 1

    def collect(self, step):
        """Return rows (observation, actions, rewards with bootstrap, done, steps made) and the observation after the last one."""
        if step != self.step:
            self.step, self.begun = step, 0
        rows = []
        for _ in range(HORIZON // CHUNK):
            seen, rewards, done = self.obs, [0.0] * CHUNK, False
            actions = [math.sin(float(seen.sum()) + index) for index in range(CHUNK)]
            for index, action in enumerate(actions):
                self.obs, rewards[index], terminated, truncated, _ = self.env.step(action)
                done = terminated or truncated
                if done:
                    rewards[-1] += GAMMA * (self.obs[1] / 2 + 1) if truncated else 0.0
                    self.begin()
                    break
            rows.append((seen, actions, rewards, done, index + 1))
        return rows, self.obs


BATCHING = ("lockstep", "decoupled")


@pytest.mark.parametrize(
    ("envs", "rollouts", "stages", "batching"),
    itertools.product((1, 2, 3), (1, 2, 3), (1, 2), BATCHING),
    ids="{}".format,
)
def test_every_transition_is_that_of_a_plain_loop_and_arrives_once(envs, rollouts, stages, batching):
    world = World(envs, rollouts, stages, batching=batching)
    plain = [PlainSimulator(number) for number in range(envs * PER_WORKER)]

    async def check(step, actors, direct=False):
        received, stats = await world.collect(step, actors, direct)
        assert all(len(parts) == len(received[0]) for parts in received)
        merged = merge_trajectories([part for parts in received for part in parts])
        assert sorted(merged.env_ids.tolist()) == list(range(len(plain)))
        made = 0
        for column, number in enumerate(merged.env_ids.tolist()):
            rows, last = plain[number].collect(step)
            for decision, (seen, actions, rewards, done, steps) in enumerate(rows):
                at = (decision, column)
                assert merged.forward_inputs["states"][at].tolist() == seen.tolist()
                assert merged.actions[at].tolist() == pytest.approx(actions, abs=1e-4)
                assert merged.prev_logprobs[at].flatten().tolist() == pytest.approx([a / 10 for a in actions], abs=1e-4)
                assert merged.rewards[at].tolist() == pytest.approx(rewards, abs=1e-4)
                assert merged.prev_values[at].item() == seen[1] / 2 + 1
                assert merged.dones[decision + 1, column].tolist() == [False] * (CHUNK - 1) + [done]
                assert merged.sub_steps[at] == steps and merged.valid[at]
                made += steps
            assert merged.prev_values[-1, column].item() == last[1] / 2 + 1
            assert not merged.dones[0, column].any()
        assert sum(one.steps for one in stats) == made

    async def twice():
        await check(1, actors=1)
        await check(2, actors=2, direct=True)
        await check(3, actors=1, direct=True)

    asyncio.run(twice())


@pytest.mark.parametrize("batching", BATCHING)
def test_a_collection_that_was_given_up_is_repeated_exactly(batching):
    """Without auto-reset every collection begins with the seeds of its step, whatever happened before."""

    async def collected(world):
        received, _ = await world.collect(2, 1)
        merged = merge_trajectories(received[0])
        order = np.argsort(merged.env_ids)
        return [getattr(merged, name)[:, order] for name in ("actions", "rewards", "dones", "sub_steps")]

    async def given_up(world):
        begun = [asyncio.ensure_future(env.interact(*world.channels[1::-1], first_request)) for env in world.envs]
        await world.channels[0].get_async(key=first_request.key(0, 0, 0), timeout=5)
        return begun

    first_request = CollectionRequest(number=99, step=2, envs=(0, 1), rollouts=(0, 1))

    async def main():
        calm, disturbed = (World(2, 2, 1, autoReset=False, batching=batching) for _ in range(2))
        expected = await collected(calm)
        await disturbed.collect(1, 1)
        begun = await given_up(disturbed)
        for tensors in zip(await collected(disturbed), expected, strict=True):
            assert torch.equal(*tensors)
        assert all(task.cancelled() or task.done() for task in begun)
        await asyncio.gather(*begun, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("decisions", [1, 2, 3])
@pytest.mark.parametrize("rollouts", [1, 2, 3])
@pytest.mark.parametrize(("direct", "hangs"), [(False, False), (True, False), (True, True)])
def test_an_env_worker_that_is_lost_costs_its_open_episodes_only(rollouts, decisions, direct, hangs, batching):
    world, lost = World(2, rollouts, 1, batching=batching), 1
    plain = [PlainSimulator(number) for number in range(2 * PER_WORKER)]

    async def check():
        received, _ = await world.collect(1, 1, direct, lose=(lost, decisions, hangs))
        if hangs:
            world.envs[lost].release.set()
        merged = merge_trajectories(received[0])
        assert sorted(merged.env_ids.tolist()) == list(range(len(plain)))
        trained = 0
        for column, number in enumerate(merged.env_ids.tolist()):
            rows, _ = plain[number].collect(1)
            mine, finished = number // PER_WORKER == lost, 0
            if mine:  # what came before the end of its last finished episode is kept, and nothing else
                finished = max((at + 1 for at in range(decisions) if rows[at][3]), default=0)
            for decision, (seen, actions, rewards, done, steps) in enumerate(rows):
                at = (decision, column)
                kept = not mine or decision < finished
                assert merged.valid[at] == kept
                trained += kept and mine
                if kept:
                    assert merged.forward_inputs["states"][at].tolist() == seen.tolist()
                    assert merged.actions[at].tolist() == pytest.approx(actions, abs=1e-4)
                    assert merged.rewards[at].tolist() == pytest.approx(rewards, abs=1e-4)
                    assert merged.dones[decision + 1, column, -1] == done and merged.sub_steps[at] == steps
                elif decision >= decisions:
                    assert merged.sub_steps[at] == 0 and not merged.rewards[at].any()
        assert trained or decisions == 1

    asyncio.run(check())


def test_an_env_worker_that_is_lost_before_its_first_observations_ends_the_collection():
    world = World(1, 1, 1)

    async def main():
        observations, actions, trajectories = world.channels
        request = CollectionRequest(number=1, step=1, envs=(0,), rollouts=(0,))
        await observations.put_async(EnvOutput(obs=None), key=request.key(0, 0, 0))
        with pytest.raises(InfrastructureError, match="lost before its first observations"):
            await world.rollouts[0].generate(observations, actions, trajectories, request)

    asyncio.run(main())


class Receiver:
    """The state of a weight receiver."""

    state, version = ReceiverState.SERVING, 4

    def current(self):
        return self.version, f"digest {self.version}"

    async def close(self):
        pass


def serve(rollout, version, state=ReceiverState.SERVING):
    """Have a rollout learn that its receiver serves a version."""
    rollout._weights.state, rollout._weights.version = state, version
    rollout._on_weights(state, *rollout._weights.current())


def test_a_collection_that_is_requested_early_connects_at_once_and_begins_with_the_weights_it_asks_for(monkeypatch):
    world = World(1, 1, 1)
    rollout = world.rollouts[0]
    rollout._weights = Receiver()
    connected = asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()
        observations, actions, trajectories = world.channels
        address = await world.envs[0].direct_address()
        request = CollectionRequest(number=1, step=1, envs=(0,), rollouts=(0,), version=6, direct=((0, 0, address),))
        run_epoch = world.envs[0]._run_epoch

        def begins(exchange, **options):
            loop.call_soon_threadsafe(connected.set)
            return run_epoch(exchange, **options)

        monkeypatch.setattr(world.envs[0], "_run_epoch", begins)
        working = asyncio.gather(
            rollout.generate(observations, actions, trajectories, request),
            world.envs[0].interact(actions, observations, request),
        )
        await asyncio.wait_for(connected.wait(), 20)  # the first observations are on their way
        await asyncio.wait_for(rollout._pause(20), 20)  # new weights do not wait for a collection that waits for them
        for state, version in ((ReceiverState.READY, 4), (ReceiverState.SERVING, 5), (ReceiverState.APPLIED, 6)):
            await asyncio.sleep(0.01)
            serve(rollout, version, state)
        with pytest.raises(DeadlineExceeded):
            await trajectories.get_async(key=request.trajectory_key(0), timeout=0.05)
        serve(rollout, 6)
        await working
        made = await trajectories.get_async(key=request.trajectory_key(0), timeout=5)
        assert set(made.versions.tolist()) == {6}

    asyncio.run(main())


@pytest.mark.parametrize("end", ["drain", "new epoch", "another collection"])
def test_a_collection_that_waits_for_weights_never_begins_once_it_is_given_up(end):
    world = World(1, 1, 1)
    rollout = world.rollouts[0]
    rollout._weights = Receiver()
    rollout._weights.set_epoch = lambda epoch: None

    async def main():
        observations, actions, trajectories = world.channels
        waits = CollectionRequest(number=1, step=1, envs=(0,), rollouts=(0,), version=5)
        waiting = asyncio.ensure_future(rollout.generate(observations, actions, trajectories, waits))
        await asyncio.sleep(0.01)
        others = []
        if end == "another collection":
            now = CollectionRequest(number=2, step=1, envs=(0,), rollouts=(0,))
            others = [
                rollout.generate(observations, actions, trajectories, now),
                world.envs[0].interact(actions, observations, now),
            ]
        else:
            await (rollout.drain() if end == "drain" else rollout.on_new_epoch(1))
        await asyncio.gather(*others)
        serve(rollout, 5)
        with pytest.raises(InfrastructureError, match="given up the collection"):
            await waiting
        with pytest.raises(DeadlineExceeded):
            await trajectories.get_async(key=waits.trajectory_key(0), timeout=0.05)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_rollout_that_is_gone_ends_the_collection_of_its_env_worker(mode):
    """Its direct connection ends after the first observations, while the env worker waits for actions."""
    world = World(1, 1, 1)

    async def main():
        observations, actions, _ = world.channels
        address = await world.envs[0].direct_address()
        request = CollectionRequest(
            number=1,
            step=1,
            envs=(0,),
            rollouts=(0,),
            mode=mode,
            episodes=2 * (mode == "eval"),
            direct=((0, 0, address),),
        )
        working = asyncio.ensure_future(world.envs[0].interact(actions, observations, request))
        rollout = Connection.connect(address)
        rollout.send(request.opening_key(0), {})
        [(key, arrays)] = await asyncio.to_thread(rollout.receive, wait=True)
        assert key == request.key(0, 0, 0) and len(arrays["obs.states"])
        rollout.close()
        with pytest.raises(InfrastructureError, match="gone"):
            await asyncio.wait_for(working, 20)

    asyncio.run(main())


def test_observations_and_actions_arrive_as_they_were_sent():
    assert np.array_equal(from_arrays(to_arrays(np.arange(6.0).reshape(2, 3))), np.arange(6.0).reshape(2, 3))
    assert from_arrays(to_arrays(EnvOutput(obs=None))).obs is None
    generator = np.random.default_rng(0)
    sent = EnvOutput(
        obs={"a.b": generator.random((2, 3)), "pixels": np.ones((2, 4, 4, 3), np.uint8)},
        final_obs={"a.b": generator.random((2, 3))},
        rewards=generator.random((2, 2)),
        terminations=np.eye(2, dtype=bool),
        truncations=np.zeros((2, 2), bool),
        dones=np.eye(2, dtype=bool),
        sub_steps=np.array([1, 2]),
        lost=np.array([True, False]),
        env_ids=np.array([4, 5]),
        intervene_actions=generator.random((2, 2, 1)),
        intervene_flags=np.eye(2, dtype=bool),
    )
    got = from_arrays(to_arrays(sent))
    for field in fields(EnvOutput):
        before, after = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(before, dict):
            assert list(after) == list(before) and all(np.array_equal(after[name], before[name]) for name in before)
        elif field.name != "final_info":
            assert before is not None and np.array_equal(after, before)


def test_rewards_are_scaled_and_values_are_not():
    plain, scaled = (World(1, 1, 1, rewardScale=scale).rollouts[0] for scale in (1.0, 0.25))
    states, none, last = (
        torch.tensor([[1.0, 2.0]] * 2),
        torch.zeros(2, 2, dtype=torch.bool),
        torch.tensor([False, True]),
    )
    cut = none.clone()
    cut[0] = last
    output = EnvOutput(
        obs={"states": states},
        final_obs={"states": states},
        rewards=torch.tensor([[4.0, 8.0]] * 2),
        terminations=none,
        truncations=cut,
        dones=cut,
    )
    bootstrap = GAMMA * (2.0 / 2 + 1)
    assert plain.get_dones_and_rewards(output)[1].tolist() == [[4.0, pytest.approx(8 + bootstrap)], [4.0, 8.0]]
    assert scaled.get_dones_and_rewards(output)[1].tolist() == [[1.0, pytest.approx(2 + bootstrap)], [1.0, 2.0]]
