"""How a rank's groups come in: nothing is taken from another rank, nothing that was taken is lost, one question per lot."""

import asyncio

import pytest

from rl_core.actors.intake import GroupIntake
from rl_core.api.errors import DeadlineExceeded
from rl_core.channel import Channel
from rl_core.messages.groups import EndOfStep
from tests import actor_samples


class Runner:
    """Answers one rank: refuses `refused`, puts `later` off, and answers only while `open` is set."""

    def __init__(self, *refused: str, later=()) -> None:
        self.refused, self.later = set(refused), set(later)
        self.lots: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.progress = 0

    async def admit(self, records):
        self.lots.append([record.group_id for record in records])
        await self.open.wait()
        return [None if group in self.later else group not in self.refused for group in self.lots[-1]]

    def count(self):
        self.progress += 1


@pytest.fixture
def channel():
    return Channel.create("trajectories", local=True)


async def put(channel, *items):
    for item in items:
        await channel.put_async(actor_samples.make_record(item) if isinstance(item, int) else item)


async def left(channel):
    """Return what the channel holds, in order."""
    found = []
    while await asyncio.to_thread(channel.qsize):
        item = await channel.get_async()
        found.append(item if isinstance(item, EndOfStep) else item.group_id)
    return found


def receive(runner, channel, wanted, step=5, limit=30.0):
    intake = GroupIntake(channel, admit=runner.admit, progress=runner.count, wanted=wanted, step=step, limit=limit)
    return asyncio.ensure_future(intake.receive())


async def settle():
    """Let everything that can run now run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_no_more_is_taken_than_is_wanted(channel):
    await put(channel, 0, 1, 2, 3, 4)
    records = await receive(Runner(), channel, 3)
    assert [record.group_id for record in records] == ["0-0", "0-1", "0-2"]
    assert await left(channel) == ["0-3", "0-4"]


async def test_groups_that_come_together_are_asked_about_together(channel):
    runner = Runner()
    await put(channel, 0, 1, 2)
    await receive(runner, channel, 3)
    assert runner.lots == [["0-0", "0-1", "0-2"]]
    assert runner.progress == 3


async def test_what_comes_while_the_runner_decides_makes_the_next_lot(channel):
    runner = Runner()
    runner.open.clear()
    receiving = receive(runner, channel, 4)
    for group in range(4):
        await put(channel, group)
        await settle()
    assert runner.lots == [["0-0"]]
    runner.open.set()
    assert len(await receiving) == 4
    assert runner.lots == [["0-0"], ["0-1", "0-2", "0-3"]]


async def test_a_refused_group_is_replaced_by_one_that_comes_later(channel):
    runner = Runner("0-1")
    receiving = receive(runner, channel, 2)
    await put(channel, 0, 1)
    await settle()
    assert not receiving.done()
    await put(channel, 2, 3)
    assert [record.group_id for record in await receiving] == ["0-0", "0-2"]
    assert await left(channel) == ["0-3"]


async def test_groups_that_wait_come_with_one_message_and_cost_one_question(channel):
    runner = Runner()
    await put(channel, *range(40))
    assert len(await receive(runner, channel, 37)) == 37
    assert [len(lot) for lot in runner.lots] == [37]
    assert (await asyncio.to_thread(channel.stats)).gets == 37


@pytest.mark.parametrize("wanted", [1, 3, 20])
async def test_every_rank_finds_its_own_end_of_the_step(channel, wanted):
    ranks = [receive(Runner(), channel, wanted) for _ in range(3)]
    await settle()
    await put(channel, *[EndOfStep(step=5)] * 3)
    assert await asyncio.gather(*ranks) == [[], [], []]
    assert await left(channel) == []


async def test_the_end_of_an_earlier_step_is_passed_over(channel):
    await put(channel, EndOfStep(step=4), 0, EndOfStep(step=3), 1)
    assert [record.group_id for record in await receive(Runner(), channel, 2)] == ["0-0", "0-1"]


async def test_what_was_fetched_behind_the_end_of_the_step_goes_back(channel):
    await put(channel, 0, EndOfStep(step=5), 1)
    assert [record.group_id for record in await receive(Runner(), channel, 3)] == ["0-0"]
    assert await left(channel) == ["0-1"]


async def test_a_question_under_way_is_settled_when_the_step_ends(channel):
    runner = Runner()
    runner.open.clear()
    receiving = receive(runner, channel, 3)
    await put(channel, 0)
    await settle()
    await put(channel, EndOfStep(step=5))
    await settle()
    assert not receiving.done()
    runner.open.set()
    assert [record.group_id for record in await receiving] == ["0-0"]


async def test_a_cancelled_wait_takes_nothing_more(channel):
    receiving = receive(Runner(), channel, 3)
    await settle()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await put(channel, 0, 1)
    assert await left(channel) == ["0-0", "0-1"]


async def test_the_deadline_tells_what_is_held(channel):
    await put(channel, 0)
    with pytest.raises(DeadlineExceeded, match=r"must get 3 groups within deadlines\.rollout 0\.05 s, got 1"):
        await receive(Runner(), channel, 3, limit=0.05)


async def test_what_is_put_off_goes_back_to_the_channel_when_the_rank_has_its_groups(channel):
    runner = Runner(later=["0-0", "0-2"])
    await put(channel, 0, 1, 2, 3, 4)
    records = await receive(runner, channel, 2)
    assert [record.group_id for record in records] == ["0-1", "0-3"]
    assert sorted(await left(channel)) == ["0-0", "0-2", "0-4"]


async def test_what_is_put_off_is_asked_about_again_for_no_more_places_than_there_are(channel):
    runner = Runner(later=["0-0", "0-1", "0-2"])
    receiving = receive(runner, channel, 2)
    await put(channel, 0, 1, 2)
    while len(runner.lots) < 3:
        await asyncio.sleep(0)
    assert all(len(lot) <= 2 for lot in runner.lots)
    runner.later.clear()
    assert len(await receiving) == 2 and len(await left(channel)) == 1
