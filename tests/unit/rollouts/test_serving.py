"""The loop of a rollout worker over local channels: what is leased when, and where every group ends."""

import asyncio
from contextlib import contextmanager

import pytest

from rl_core.api.errors import ConfigError, GenerationUnavailable, RolloutDataFailure, RolloutTimeout
from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.channel import Channel
from rl_core.rollouts.serving import PromptServer


def item(index, mode="train", version=1, rows=2):
    return {
        "mode": mode,
        "sample": {"idx": index},
        "group_id": f"g{index}",
        "lease_token": f"t{index}",
        "attempt": 1,
        "policy_version": version,
        "num_generations": rows,
        "greedy": mode != "train",
    }


class Harness:
    def __init__(self):
        self.channels = [
            Channel.create(n, local=True, delivery=d) for n, d in (("p", "lease"), ("t", "auto"), ("v", "auto"))
        ]
        self.prompts, self.trajectories, self.validation = self.channels
        self.given_back, self.waits, self.started, self.holds = [], [], [], {}
        self.version, self.limit, self.failure = 1, 100, None
        self.server = PromptServer(
            self.run,
            give_back=self.give_back,
            row_limit=lambda: self.limit,
            group_rows=2,
            version=lambda: self.version,
            waiting=self.waiting,
        )

    async def run(self, given):
        self.started.append(given["group_id"])
        if given["group_id"] in self.holds:
            await self.holds[given["group_id"]].wait()
        if self.failure is not None:
            raise self.failure
        rewards = [0.5, float("nan")]
        completions = [
            Completion(message_log=[], reward=r, metrics={"gen_tokens": 3}, truncated=False) for r in rewards
        ]
        return PromptGroupRecord(
            prompt_idx=given["sample"]["idx"],
            prompt=[],
            extra_env_info=None,
            metadata={},
            completions=completions,
            group_id=given["group_id"],
        )

    async def give_back(self, *args):
        self.given_back.append(args)

    @contextmanager
    def waiting(self, what, on):
        self.waits.append((what, on))
        yield

    async def put(self, *items):
        for one in items:
            await self.prompts.put_async(one)

    @staticmethod
    async def depth(channel):
        return await asyncio.to_thread(channel.qsize)

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0.001)

    def start(self, *, gate=True):
        self.server.start(*self.channels)
        if gate:
            self.server.open()


@pytest.fixture
async def harness():
    made = Harness()
    yield made
    await made.server.stop()


async def test_a_finished_group_is_put_with_its_lease_token_and_then_acknowledged(harness):
    harness.start()
    await harness.put(item(0))
    record = await harness.trajectories.get_async(timeout=60)
    assert (record.group_id, record.lease_token) == ("g0", "t0")
    await harness.settle()
    assert (
        await harness.depth(harness.prompts) == 0
        and harness.server.groups_in_flight == 0
        and harness.server.groups_done == 1
    )


async def test_a_closed_gate_leases_nothing_and_says_what_it_waits_for(harness):
    harness.start(gate=False)
    await harness.put(item(0))
    await harness.settle()
    assert (
        harness.started == [] and await harness.depth(harness.prompts) == 1 and harness.waits == [("weights", "actor")]
    )
    harness.server.open()
    assert (await harness.trajectories.get_async(timeout=60)).group_id == "g0"


async def test_closing_the_gate_ends_a_lease_that_waits_and_loses_no_prompt(harness):
    harness.start()
    await harness.settle()
    harness.server.close()
    await harness.put(item(0))
    await harness.settle()
    assert harness.started == [] and await harness.depth(harness.prompts) == 1


async def test_prompts_put_together_start_together_up_to_the_row_limit(harness):
    harness.limit = 6
    harness.holds = {f"g{i}": asyncio.Event() for i in range(4)}
    harness.start()
    await harness.settle()
    assert (await asyncio.to_thread(harness.prompts.stats)).keys["default_queue"].waiters == 1
    await harness.prompts.put_many_async([item(i) for i in range(4)])
    await harness.settle()
    assert harness.started == ["g0", "g1", "g2"] and await harness.depth(harness.prompts) == 1


async def test_a_row_limit_that_fell_takes_leases_back(harness):
    harness.limit = 8
    harness.start()
    await harness.settle()
    harness.limit = 2
    harness.server.close()
    harness.server.open()
    await harness.settle()
    harness.holds = {"g0": asyncio.Event()}
    await harness.prompts.put_many_async([item(i) for i in range(3)])
    await harness.settle()
    assert harness.started == ["g0"] and await harness.depth(harness.prompts) == 2


async def test_a_prompt_that_arrives_as_the_gate_closes_goes_back(harness):
    harness.start()
    await harness.settle()
    await harness.put(item(0))
    harness.server.close()
    await harness.settle()
    assert harness.started == [] and await harness.depth(harness.prompts) == 1


async def test_leasing_stops_at_the_row_limit_and_goes_on_when_rows_end(harness):
    harness.limit = 3
    harness.holds = {f"g{i}": asyncio.Event() for i in range(4)}
    harness.start()
    await harness.put(*[item(i) for i in range(4)])
    await harness.settle()
    assert harness.started == ["g0", "g1"]
    harness.holds["g0"].set()
    await harness.settle()
    assert harness.started == ["g0", "g1", "g2"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GenerationUnavailable("x"), "infrastructure"),
        (RolloutDataFailure("x"), "data"),
        (RolloutTimeout("x"), "deadline"),
        (KeyError("x"), "data"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_a_failed_group_is_given_back_by_its_kind_and_acknowledged(harness, error, reason):
    harness.failure = error
    harness.start()
    await harness.put(item(0))
    await harness.settle()
    assert harness.given_back == [("g0", "t0", reason, f"{type(error).__name__}: {error}")]
    assert await harness.depth(harness.prompts) == 0 and await harness.depth(harness.trajectories) == 0


async def test_a_record_that_no_message_can_hold_is_given_back_once_and_not_made_again(harness, monkeypatch):
    async def put(record, **_):
        raise ValueError("header must have at most 64 bytes, got 65")

    monkeypatch.setattr(harness.trajectories, "put_async", put)
    harness.start()
    await harness.put(item(0))
    await harness.settle()
    told = "the record cannot be sent: header must have at most 64 bytes, got 65"
    assert harness.given_back == [("g0", "t0", "data", told)] and harness.started == ["g0"]
    assert await harness.depth(harness.prompts) == 0


async def test_a_record_that_meets_a_missing_channel_server_goes_back_and_is_no_bad_data(harness, monkeypatch):
    put, refusals = harness.trajectories.put_async, []

    async def refuse_once(record, **more):
        if not refusals:
            refusals.append(record)
            raise ConfigError("the channel server knows no such channel")
        await put(record, **more)

    monkeypatch.setattr(harness.trajectories, "put_async", refuse_once)
    harness.start()
    await harness.put(item(0))
    await harness.settle()
    assert harness.given_back == [] and harness.started == ["g0", "g0"]
    assert await harness.depth(harness.trajectories) == 1


async def test_validation_answers_scores_or_the_error(harness):
    harness.start()
    await harness.put(item(0, mode="validation"))
    assert await harness.validation.get_async(timeout=60) == {
        "group_id": "g0", "prompt_idx": 0, "rewards": [0.5, None], "lengths": [3, 3], "truncated": [False, False], "error": None,
    }  # fmt: skip
    harness.failure = RolloutDataFailure("broken")
    await harness.put(item(1, mode="validation"))
    answer = await harness.validation.get_async(timeout=60)
    assert answer["rewards"] == [] and "broken" in answer["error"] and harness.given_back == []


async def test_a_prompt_for_newer_weights_goes_back_until_they_are_here(harness):
    harness.start()
    await harness.put(item(0, version=2))
    await harness.settle()
    assert harness.started == []
    harness.version = 2
    assert (await harness.trajectories.get_async(timeout=60)).group_id == "g0"


async def test_pausing_lets_groups_end(harness):
    harness.holds = {"g0": asyncio.Event()}
    harness.start()
    await harness.put(item(0))
    await harness.settle()
    pausing = asyncio.ensure_future(harness.server.pause(60))
    await harness.settle()
    assert not pausing.done()
    harness.holds["g0"].set()
    await pausing
    assert await harness.depth(harness.trajectories) == 1 and harness.server.groups_in_flight == 0


@pytest.mark.parametrize("how", ["pause", "stop"])
async def test_groups_that_cannot_end_return_to_the_channel(harness, how):
    harness.holds = {"g0": asyncio.Event()}
    harness.start()
    await harness.put(item(0))
    await harness.settle()
    await (harness.server.pause(0.01) if how == "pause" else harness.server.stop())
    assert (
        await harness.depth(harness.prompts) == 1
        and await harness.depth(harness.trajectories) == 0
        and harness.given_back == []
    )


async def test_starting_twice_keeps_one_loop_and_a_stopped_server_starts_again(harness):
    harness.start()
    harness.start()
    await harness.put(item(0))
    await harness.trajectories.get_async(timeout=60)
    await harness.server.stop()
    harness.start()
    await harness.put(item(1))
    assert (await harness.trajectories.get_async(timeout=60)).group_id == "g1"
    assert harness.started == ["g0", "g1"]


async def test_a_channel_that_was_closed_is_not_asked_again_and_again(harness):
    harness.start()
    await harness.settle()
    await harness.prompts.close_async()
    await harness.settle()
    calls = len(harness.waits)
    await harness.settle()
    assert len(harness.waits) == calls
