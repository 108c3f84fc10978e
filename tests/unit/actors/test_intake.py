"""How a rank's groups come in: the records under its own key, and no others."""

import asyncio

import pytest

from rl_core.actors.base import receive_groups
from rl_core.api.errors import DeadlineExceeded
from rl_core.channel import Channel
from tests import actor_samples


@pytest.fixture
def channel():
    return Channel.create("trajectories", local=True)


async def put(channel, *groups, key="mine"):
    for group in groups:
        await channel.put_async(actor_samples.make_record(group), key=key)


def receive(channel, wanted, *, limit=30.0, key="mine", progress=lambda: None):
    return asyncio.ensure_future(receive_groups(channel, wanted=wanted, limit=limit, key=key, progress=progress))


def names(records):
    return [record.group_id for record in records]


async def settle():
    """Let everything that can run now run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_rank_takes_the_records_under_its_key_as_they_come(channel):
    seen = []
    receiving = receive(channel, 3, progress=lambda: seen.append(1))
    await put(channel, 7, key="another rank's")
    await put(channel, 0, 1)
    await settle()
    assert not receiving.done() and len(seen) == 2
    await put(channel, 2)
    assert names(await receiving) == ["0-0", "0-1", "0-2"] and len(seen) == 3


async def test_groups_that_wait_come_with_one_message(channel):
    await put(channel, *range(40))
    assert len(await receive(channel, 37)) == 37
    assert (await asyncio.to_thread(channel.stats)).gets == 37


@pytest.mark.parametrize("there", [0, 2])
async def test_a_key_that_the_runner_closes_ends_the_wait_after_what_is_there(channel, there):
    receiving = receive(channel, 4)
    await put(channel, *range(there))
    channel.close_key("mine").result()
    assert len(await receiving) == there


async def test_a_cancelled_wait_takes_nothing_more(channel):
    receiving = receive(channel, 3)
    await settle()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await put(channel, 0, 1)
    assert names(await receive(channel, 2)) == ["0-0", "0-1"]


async def test_the_deadline_tells_how_many_came(channel):
    await put(channel, 0)
    with pytest.raises(DeadlineExceeded, match=r"must get 3 groups within deadlines\.rollout 0\.05 s, got 1"):
        await receive(channel, 3, limit=0.05)
