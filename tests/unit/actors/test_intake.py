"""How a rank's groups come in: nothing is taken from another rank, nothing that was taken is lost, one question per lot."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import actor_samples
import pytest

from rl_core.actors import intake
from rl_core.api.errors import DeadlineExceeded
from rl_core.channel import Channel


class Rank:
    """What `receive` needs of an actor; the runner refuses `refused` and answers while `open` is set."""

    def __init__(self, *refused: str) -> None:
        self.cfg = SimpleNamespace(
            algorithm=SimpleNamespace(dynamic_sampling=SimpleNamespace(enabled=True, min_std=1e-6))
        )
        self.ranks = SimpleNamespace(rank=0)
        self.stand_alone = False
        self.refused = set(refused)
        self.lots: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.progress = 0

    def waiting(self, what, on):
        return nullcontext()

    def record_progress(self, what):
        self.progress += 1

    async def hub_call(self, method, entries):
        assert method == "admit"
        self.lots.append([entry["group_id"] for entry in entries])
        await self.open.wait()
        return [group_id not in self.refused for group_id in self.lots[-1]]


@pytest.fixture
def channel():
    return Channel.create("trajectories", local=True)


async def put(channel, *items):
    for item in items:
        await channel.put_async(actor_samples.make_record(item) if isinstance(item, int) else item)


async def left(channel):
    """Return what the channel holds, in order."""
    found = []
    while (await channel.stats_async()).depth:
        item = await channel.get_async()
        found.append(item if isinstance(item, dict) else item.group_id)
    return found


def receive(rank, channel, wanted, step=5, limit=30.0):
    return asyncio.ensure_future(intake.receive(rank, channel, wanted, step, limit=limit))


async def settle():
    """Let everything that can run now run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_no_more_is_taken_than_is_wanted(channel):
    await put(channel, 0, 1, 2, 3, 4)
    records = await receive(Rank(), channel, 3)
    assert [record.group_id for record in records] == ["0-0", "0-1", "0-2"]
    assert await left(channel) == ["0-3", "0-4"]


async def test_groups_that_come_together_are_asked_about_together(channel):
    rank = Rank()
    await put(channel, 0, 1, 2)
    await receive(rank, channel, 3)
    assert rank.lots == [["0-0", "0-1", "0-2"]]
    assert rank.progress == 3


async def test_what_comes_while_the_runner_decides_makes_the_next_lot(channel):
    rank = Rank()
    rank.open.clear()
    receiving = receive(rank, channel, 4)
    for group in range(4):
        await put(channel, group)
        await settle()
    assert rank.lots == [["0-0"]]
    rank.open.set()
    assert len(await receiving) == 4
    assert rank.lots == [["0-0"], ["0-1", "0-2", "0-3"]]


async def test_a_refused_group_is_replaced_by_one_that_comes_later(channel):
    rank = Rank("0-1")
    receiving = receive(rank, channel, 2)
    await put(channel, 0, 1)
    await settle()
    assert not receiving.done()
    await put(channel, 2, 3)
    assert [record.group_id for record in await receiving] == ["0-0", "0-2"]
    assert await left(channel) == ["0-3"]


async def test_more_groups_than_fetches_are_received(channel):
    wanted = 2 * intake.FETCHES + 3
    await put(channel, *range(wanted))
    assert len(await receive(Rank(), channel, wanted)) == wanted


@pytest.mark.parametrize("wanted", [1, 3, intake.FETCHES + 4])
async def test_every_rank_finds_its_own_end_of_the_step(channel, wanted):
    ranks = [receive(Rank(), channel, wanted) for _ in range(3)]
    await settle()
    await put(channel, *[{"end_of_step": 5}] * 3)
    assert await asyncio.gather(*ranks) == [[], [], []]
    assert await left(channel) == []


async def test_the_end_of_an_earlier_step_is_passed_over(channel):
    await put(channel, {"end_of_step": 4}, 0, {"end_of_step": 3}, 1)
    assert [record.group_id for record in await receive(Rank(), channel, 2)] == ["0-0", "0-1"]


async def test_what_was_fetched_behind_the_end_of_the_step_goes_back(channel):
    await put(channel, 0, {"end_of_step": 5}, 1)
    assert [record.group_id for record in await receive(Rank(), channel, 3)] == ["0-0"]
    assert await left(channel) == ["0-1"]


async def test_a_question_under_way_is_settled_when_the_step_ends(channel):
    rank = Rank()
    rank.open.clear()
    receiving = receive(rank, channel, 3)
    await put(channel, 0)
    await settle()
    await put(channel, {"end_of_step": 5})
    await settle()
    assert not receiving.done()
    rank.open.set()
    assert [record.group_id for record in await receiving] == ["0-0"]


async def test_a_cancelled_wait_takes_nothing_more(channel):
    receiving = receive(Rank(), channel, 3)
    await settle()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await put(channel, 0, 1)
    assert await left(channel) == ["0-0", "0-1"]


async def test_the_deadline_tells_what_is_held(channel):
    await put(channel, 0)
    with pytest.raises(DeadlineExceeded, match=r"must get 3 groups within deadlines\.rollout 0\.05 s, got 1"):
        await receive(Rank(), channel, 3, limit=0.05)
