"""Images go through shared memory: each is that of its transition, none travels in a message, and the memory is given back."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from rl_core.api.records import EnvOutput
from rl_core.batching.trajectories import merge_trajectories
from rl_core.channel import Channel, puts
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.rollouts.embodied import merge_env_outputs
from rl_core.rollouts.observation_rows import ObservationRows
from rl_core.transports import shared_memory
from rl_core.transports.direct import Connection
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.tokens import DIRECTORY
from tests.unit.embodied.simulators import Picture, picture
from tests.unit.embodied.test_collection import CHUNK, HORIZON, PER_WORKER, Sine, World

PICTURE = {"id": "tests.unit.embodied.simulators:Picture", "vectorization": "process"}
FRAME_BYTES = Picture.SIDE * Picture.SIDE * 3
DECISIONS = HORIZON // CHUNK


class Seeing(Sine):
    """A policy that trains on images, and whose values follow from the images."""

    def predict(self, obs, mode="train"):
        actions, result = super().predict(obs, mode)
        result["forward_inputs"]["pixels"] = obs["pixels"]
        result["prev_values"] = obs["pixels"][:, 0, 0, 1:2].float() / 2 + 1
        return actions, result


class SeeingOnly(Seeing):
    """The same for simulators that show nothing but the image."""

    def predict(self, obs, mode="train"):
        return super().predict(obs | {"states": obs["pixels"][:, 0, 0, :2].float()}, mode)


@pytest.fixture
def trajectories():
    """A channel of a server, as the actors receive from."""
    server = ChannelServer("tcp://127.0.0.1:0").start()
    client = ChannelClient(server.address)
    yield Channel.create("trajectories", client=client)
    client.close()
    server.close()


@pytest.fixture
def world(trajectories):
    def make(*counts, **options):
        made = World(*counts, **PICTURE | options)
        made.channels[2] = trajectories
        for rollout in made.rollouts:
            rollout.model = Seeing()
        return made

    return make


async def released():
    """Wait until all memory of the server is given back; return the names of its segments."""
    store = ProcessSharedMemory.shared().store
    while store.stats()["lent"]:
        await asyncio.sleep(0.001)
    return set(store._idle)


def check_images(merged):
    """Each image, and each value that a reward or a trajectory ends with, is that of the observation beside it."""
    for at in np.ndindex(tuple(merged.rewards.shape[:2])):
        assert np.array_equal(merged.forward_inputs["pixels"][at], picture(merged.forward_inputs["states"][at]))
    assert torch.equal(merged.prev_values[:-1, :, 0], merged.forward_inputs["states"][..., 1] / 2 + 1)


@pytest.mark.parametrize(
    ("envs", "rollouts", "stages", "vectorization"),
    [
        (1, 1, 1, "process"),
        (1, 2, 2, "process"),
        (1, 1, 2, "sync"),
        (2, 1, 1, "sync"),
        (2, 3, 2, "sync"),
        (3, 2, 1, "sync"),
    ],
)
def test_trajectories_are_those_of_observations_in_messages(world, envs, rollouts, stages, vectorization):
    """The first collection learns the shapes. One of several pairs of an env worker and a rollout exchanges them by the channels."""
    shared = world(envs, rollouts, stages, vectorization=vectorization, numEnvs=4)
    plain = world(envs, rollouts, stages, vectorization="sync", numEnvs=4)

    async def collected(one, step, direct):
        received, _ = await one.collect(step, 1, direct)
        return merge_trajectories(received[0])

    async def main():
        for step in (1, 2, 3):
            found, expected = await collected(shared, step, True), await collected(plain, step, False)
            check_images(found)
            assert torch.equal(found.rewards, expected.rewards) and found.dones.any()
            for name in ("pixels", "states", "actions"):
                assert torch.equal(found.forward_inputs[name], expected.forward_inputs[name])
            assert torch.equal(found.prev_values, expected.prev_values)

    asyncio.run(main())


@pytest.mark.parametrize("envs", [1, 2])
def test_observations_may_be_images_alone(world, envs):
    one = world(envs, 1, 1, vectorization="sync", id="tests.unit.embodied.simulators:Bare")
    one.rollouts[0].model = SeeingOnly()

    async def main():
        for step in (1, 2, 3):
            received, stats = await one.collect(step, 1, True)
            check_images(merge_trajectories(received[0]))
            assert not any(env.lost for env in stats)

    asyncio.run(main())


@pytest.mark.parametrize("auto_reset", [True, False])
def test_an_image_is_written_once_and_read_where_it_lies(world, monkeypatch, auto_reset):
    """Messages have fewer bytes than the images that they would have to carry."""
    one, sent = world(1, 1, 1, autoReset=auto_reset, numEnvs=2), []

    def counted(self, key, arrays, descriptor=None, *, pack=Connection.pack):
        sent.append(len(pack(self, key, arrays)))
        return pack(self, key, arrays)

    async def main():
        await one.collect(1, 1, True)
        monkeypatch.setattr(Connection, "pack", counted)
        for step in (2, 3, 4):
            received, _ = await one.collect(step, 1, True)
            check_images(merge_trajectories(received[0]))

    asyncio.run(main())
    assert sent and max(sent) < FRAME_BYTES


def test_a_simulator_that_dies_begins_its_next_episode_in_the_same_place(world):
    one, killed = world(1, 1, 1, numEnvs=2), 1
    worker = one.envs[0]
    make_step = worker.env_interact_step

    def deadly(actions, stage):
        if worker.envs[0]._row == 1:
            os.kill(worker.envs[0]._slots.pids[killed], signal.SIGKILL)
        return make_step(actions, stage)

    async def main():
        await one.collect(1, 1, True)
        worker.env_interact_step = deadly
        for step in (2, 3):
            received, stats = await one.collect(step, 1, True)
            merged = merge_trajectories(received[0])
            check_images(merged)
            assert stats[0].lost == 1 and not merged.valid[1, killed]
            assert merged.forward_inputs["states"][2, killed, 1] == 0
            assert merged.valid[:, 0].all()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_the_memory_of_a_lost_env_worker_is_never_lent_again(world, hangs):
    one = world(2, 1, 1, vectorization="sync")

    async def main():
        await one.collect(1, 1, True)
        await one.collect(2, 1, True)
        before = await released()
        received, _ = await one.collect(3, 1, True, lose=(1, 2, hangs))
        merged = merge_trajectories(received[0])
        check_images(merged)
        valid = merged.valid[:, merged.env_ids >= PER_WORKER]
        assert not valid[2:].any() and merged.valid[:, merged.env_ids < PER_WORKER].all()
        if hangs:
            one.envs[1].release.set()
        gone = before - await released()
        assert len(gone) == 1 and not (DIRECTORY / gone.pop()).exists()

    asyncio.run(main())
    one.envs[1] = one.envs[1].env


def test_the_memory_is_bounded(world):
    one = world(1, 1, 2, vectorization="sync")

    async def main():
        await one.collect(1, 1, True)
        await one.collect(2, 1, True)
        first = await released()
        assert first
        for step in range(3, 9):
            await one.collect(step, 1, True)
            assert await released() == first

    asyncio.run(main())


def test_a_final_observation_that_no_simulator_wrote_has_none_of_the_bytes_that_were_there_before(trajectories):
    """A policy may look up the numbers of an observation, such as token ids, also of episodes that go on."""
    layout, ended = {"instruction": (np.dtype(np.int64), (64,))}, torch.tensor([[True], [False]])
    for _ in range(2):
        rows = asyncio.run(ObservationRows.allocate(trajectories.allocate_async, layout, outputs=4, simulators=2))
        output = EnvOutput(obs={}, rewards=torch.zeros(2, 1), dones=ended)
        [output] = rows.receive([output], [2], [False])
        assert not rows.fill(output).final_obs["instruction"].any()
        for array in rows._shared.arrays.values():
            array[:] = 2**40
        rows.release(reuse=True)


@pytest.mark.parametrize("vectorization", ["sync", "process"])
def test_a_final_observation_stays_while_the_next_actions_are_made(trajectories, vectorization):
    """The rollout computes the value of the observation after it has sent the next actions, which may end another episode."""
    layout, actions = {"pixels": (np.dtype(np.uint8), (Picture.SIDE, Picture.SIDE, 3))}, np.zeros(2)
    env = GymnasiumVectorEnv(PICTURE["id"], 2, vectorization=vectorization, ends=(-1,), seed_of=lambda *at: sum(at))
    try:
        env.reset()
        rows = asyncio.run(ObservationRows.allocate(trajectories.allocate_async, layout, outputs=4, simulators=2))
        env.share([rows.column(number) for number in range(2)])
        rows.receive([env.current()], [2], [False])
        finals = []
        for _ in range(3):
            [output] = rows.receive([env.step(actions)], [2], [False])
            finals.append(rows.fill(merge_env_outputs([output], [2])).final_obs)
            for final_obs in finals[-2:]:
                assert np.array_equal(final_obs["pixels"], [picture(states) for states in final_obs["states"]])
    finally:
        env.close()


@pytest.mark.parametrize("loses", [False, True])
def test_the_channel_copies_images_only_where_a_lost_env_worker_may_still_write_to_them(world, monkeypatch, loses):
    one, copied = world(2, 1, 1, vectorization="sync"), []
    monkeypatch.setattr(shared_memory, "THRESHOLD", FRAME_BYTES)

    def counted(target, source, *, copy_into=puts.copy_into):
        copied.append(source.nbytes)
        copy_into(target, source)

    async def main():
        await one.collect(1, 1, True)
        monkeypatch.setattr(puts, "copy_into", counted)
        received, _ = await one.collect(2, 1, True, lose=(1, 2) if loses else None)
        images = received[0][0].forward_inputs["pixels"]
        assert (images.nbytes in copied) == loses
        if not loses:
            await one.collect(3, 1, True)  # does not write to the images of the last one
        check_images(merge_trajectories(received[0]))

    asyncio.run(main())
    if loses:
        one.envs[1] = one.envs[1].env


@pytest.mark.parametrize("vectorization", ["sync", "process"])
def test_memory_may_have_another_user_once_the_last_output_was_sent(world, vectorization):
    """The env worker needs the last image again: the next collection begins with it."""
    one = world(1, 1, 1, vectorization=vectorization)
    [worker] = one.envs
    send, columns, sent = worker._send, [], 0

    def reused(exchange, stage, output):
        nonlocal sent
        sent += 1
        columns[:] = worker.envs[0]._columns if worker.envs[0]._columns[0] else columns
        send(exchange, stage, output)
        if sent % (DECISIONS + 1) == 0:
            for column in columns:
                column["pixels"][DECISIONS] = 7

    async def main():
        worker._send = reused
        for step in (1, 2, 3, 4):
            received, _ = await one.collect(step, 1, True)
            check_images(merge_trajectories(received[0]))
        assert columns

    asyncio.run(main())
