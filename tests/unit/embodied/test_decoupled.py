"""Decisions for env workers as their observations come: a slow one holds up no other, and what has come is decided in one batch."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from rl_core.api.embodied import EmbodiedOptions
from rl_core.api.errors import ConfigError, DataError
from rl_core.api.records import ChunkStepResult, EnvOutput
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel
from rl_core.messages.embodied import CollectionRequest
from rl_core.rollouts.decoupled import BATCH_SECONDS, DecoupledDecisions, Lane, split_step
from rl_core.rollouts.recorder import TrajectoryRecorder
from rl_core.rollouts.served_envs import ServedEnvs
from rl_core.transports.direct import Mailbox
from tests.unit.embodied.test_collection import CHUNK, HORIZON, World

SIZE = 2
"""Simulators of a lane in tests of the decisions alone."""


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("direct", [False, True])
def test_an_env_worker_that_is_held_does_not_hold_up_the_others_of_its_rollout(slow, stages, direct):
    world, events, gate = World(3, 1, stages, batching="decoupled"), [], threading.Event()
    held, others = world.envs[slow], [env for env in world.envs if env is not world.envs[slow]]
    step = held.env_interact_step

    def gated(chosen, stage):
        gate.wait(60)
        events.append("step of the slow one")
        return step(chosen, stage)

    def ended(interact: Callable) -> Callable:
        async def run(*args):
            stats = await interact(*args)
            events.append("end of a fast one")
            if events.count("end of a fast one") == len(others):
                gate.set()
            return stats

        return run

    held.env_interact_step = gated
    for env in others:
        env.interact = ended(env.interact)
    asyncio.run(world.collect(1, 1, direct))
    assert events == ["end of a fast one"] * 2 + ["step of the slow one"] * (stages * HORIZON // CHUNK)


class Decisions:
    """Lanes of one decision each, whose messages are put by a test, and the batches that were decided."""

    def __init__(self, lanes, min_batch_size, clock):
        self.channel, self.actions = (Channel.create(name, local=True) for name in ("observations", "actions"))
        self.batches, self.decided = [], asyncio.Event()
        request = CollectionRequest(number=1, step=1, envs=tuple(range(lanes)), rollouts=(0,))
        options = EmbodiedOptions(id="x", num_envs=SIZE)
        self.envs = ServedEnvs(request, index=0, options=options, group=1, waiting=lambda *_: contextlib.nullcontext())
        self.collection = DecoupledDecisions(
            envs=self.envs,
            lanes=[
                Lane(0, number, SIZE, TrajectoryRecorder(sender=0, stage=0, auto_reset=True)) for number in range(lanes)
            ],
            decisions=1,
            min_batch_size=min_batch_size,
            decide=self.decide,
            observe=lambda recorder, output: None,
            end=lambda recorder, output: None,
            progress=lambda kind: None,
            clock=clock,
        )

    def decide(self, output):
        states = output.obs["states"]
        self.batches.append(states[::SIZE, 0].int().tolist())
        self.decided.set()
        log_probs = torch.zeros(len(states), 1, 1)
        return states, partial(
            ChunkStepResult, actions=states, prev_logprobs=log_probs, prev_values=None, forward_inputs={}
        )

    async def send(self, *lanes):
        for lane in lanes:
            states = np.full((SIZE, 1), lane, np.float32)
            await self.channel.put_async(EnvOutput(obs={"states": states}), key=self.envs.key(0, lane))

    def run(self):
        exchange = DirectChannel(Mailbox(), get_from=self.channel, put_to=self.actions, seconds=60)
        return asyncio.ensure_future(self.collection.run(exchange))


def test_all_that_have_come_are_decided_in_one_batch_in_the_order_of_the_env_workers():
    async def main():
        decisions = Decisions(4, 1, lambda: 0.0)
        await decisions.send(3, 0, 2)
        running = decisions.run()
        await asyncio.wait_for(decisions.decided.wait(), 30)
        assert decisions.batches == [[0, 2, 3]]
        await decisions.send(0, 1, 2, 3, 1)
        await asyncio.wait_for(running, 30)
        assert decisions.batches == [[0, 2, 3], [1]]

    asyncio.run(main())


def test_a_decision_waits_for_its_smallest_batch_while_the_time_lasts():
    """The clock stands still until the test lets it go on."""
    now = 0.0

    async def main():
        nonlocal now
        decisions = Decisions(3, 2, lambda: now)
        await decisions.send(0)
        running = decisions.run()
        await asyncio.sleep(2 * BATCH_SECONDS)
        assert decisions.batches == []
        await decisions.send(2)
        await asyncio.wait_for(decisions.decided.wait(), 30)
        assert decisions.batches == [[0, 2]]
        decisions.decided.clear()
        await decisions.send(1)
        await asyncio.sleep(2 * BATCH_SECONDS)
        assert decisions.batches == [[0, 2]]
        now += BATCH_SECONDS
        await asyncio.wait_for(decisions.decided.wait(), 30)
        assert decisions.batches == [[0, 2], [1]]
        await decisions.send(0, 1, 2)
        await asyncio.wait_for(running, 30)

    asyncio.run(main())


def test_a_decision_on_several_env_workers_is_split_as_their_simulators_are():
    actions = torch.arange(10).view(5, 2)
    step = ChunkStepResult(
        actions=actions,
        prev_logprobs=actions[..., None] / 2,
        prev_values=actions[:, :1],
        forward_inputs={"states": actions + 1},
        versions=7,
    )
    parts = split_step(step, [2, 3])
    assert [len(part.actions) for part in parts] == [2, 3] and all(part.versions == 7 for part in parts)
    for name in ("actions", "prev_logprobs", "prev_values"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(step, name))
    assert torch.equal(torch.cat([part.forward_inputs["states"] for part in parts]), actions + 1)


def test_actions_of_another_number_than_the_simulators_are_refused():
    async def main():
        decisions = Decisions(2, 1, lambda: 0.0)
        decisions.collection.decide = lambda output: (torch.zeros(3, 1), None)
        await decisions.send(0, 1)
        with pytest.raises(DataError, match=r"as many as the simulators \[2, 2\], got 3"):
            await asyncio.wait_for(decisions.run(), 30)

    asyncio.run(main())


def test_a_smallest_batch_is_refused_in_lockstep():
    with pytest.raises(ConfigError, match=r"env.options.minBatchSize needs env.options.batching: decoupled, got 2"):
        World(1, 1, 1, minBatchSize=2)
