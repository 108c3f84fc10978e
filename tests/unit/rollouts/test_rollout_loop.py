"""The loop of a rollout worker over a fake of the runner's ledger: what is leased when, and where every group ends."""

import asyncio
import logging
import math

import pytest
import torch

from rl_core.api.errors import (
    ConfigError,
    GenerationUnavailable,
    GymTransportError,
    RolloutDataFailure,
    RolloutTimeout,
    WorkerLost,
)
from rl_core.messages.groups import ValidationScores
from rl_core.rollouts import rollout_loop
from rl_core.rollouts.failed_sample import attach_sample
from rl_core.rollouts.rollout_loop import POLL_SECONDS
from tests.unit.rollouts.rollout_loop_world import Harness, lease

STOPPED = "the rollout stopped before the group ended"
LATE = "its weights are not those that are served"


@pytest.fixture
async def harness():
    made = Harness()
    yield made
    await made.loop.stop()
    await made.runner.set(refuses=True)  # ends the polls that wait
    await made.settle()


async def test_a_finished_group_is_put_with_the_token_of_its_lease(harness):
    await harness.serving(lease(0))
    record = await harness.record(0)
    assert (record.group_id, record.lease_token) == ("g0", "t0")
    await harness.settle()
    assert harness.loop.groups_in_flight == 0 and harness.loop.groups_done == 1
    assert harness.runner.given_back == []


async def test_what_a_rollout_declares_to_wait_for_is_the_reason_of_a_stall(harness, monkeypatch):
    async def full(record, key):
        await asyncio.Event().wait()

    monkeypatch.setattr(harness.trajectories, "put_async", full)
    harness.start(gate=False)
    await harness.settle()
    assert harness.stall_reason() == "WaitingForWeights"
    harness.loop.open()
    await harness.runner.put(lease(0))
    await harness.until(lambda: (wait := harness.context.heartbeat().wait) is not None and wait.on == "trajectories")
    assert harness.stall_reason() == "ChannelFull"


async def test_the_runner_hears_of_a_group_once_its_record_is_stored(harness):
    await harness.serving(lease(0), lease(1, mode="validate"))
    (entry,) = harness.runner.finished
    assert (entry.group_id, entry.token) == ("g0", "t0")
    assert await harness.depth(harness.trajectories) == 1


async def test_a_finished_group_is_reported_until_the_runner_hears_of_it(harness):
    harness.runner.unheard = 2
    await harness.serving(lease(0))
    await harness.until(lambda: len(harness.runner.finished) == 3)
    await harness.until(lambda: harness.loop.groups_done == 1)
    assert harness.runner.given_back == []


async def test_a_group_whose_lease_is_lost_while_its_record_is_stored_is_still_reported(harness, monkeypatch):
    """Otherwise nobody would delete the record: the runner deleted what was there when the lease ended."""
    stored, put = asyncio.Event(), harness.trajectories.put_async

    async def slow_put(record, key):
        await stored.wait()
        await put(record, key=key)

    monkeypatch.setattr(harness.trajectories, "put_async", slow_put)
    await harness.serving(lease(0))
    harness.loop.drop(["t0"])
    stored.set()
    await harness.until(lambda: harness.runner.finished)
    assert harness.runner.finished[0].token == "t0" and harness.runner.given_back == []


async def test_a_closed_gate_asks_for_nothing_and_says_what_it_waits_for(harness):
    harness.start(gate=False)
    await harness.settle()
    assert harness.runner.polls == [] and harness.waits == [("weights", "actor")]
    harness.loop.open()
    await harness.runner.put(lease(0))
    assert (await harness.record(0)).group_id == "g0"


async def test_one_poll_asks_for_all_that_fits_and_the_next_for_what_is_left(harness):
    harness.limit = 6
    harness.hold(0, 1, 2, 3)
    await harness.serving()
    assert harness.runner.polls == [(3, 1)] and harness.waits == [("prompts", "ledger")]
    await harness.runner.put(lease(0), lease(1))
    await harness.settle()
    assert harness.runner.polls == [(3, 1), (1, 1)] and harness.started == ["g0", "g1"]
    await harness.runner.put(lease(2), lease(3))
    await harness.settle()
    assert harness.started == ["g0", "g1", "g2"] and len(harness.runner.polls) == 2
    harness.holds["g0"].set()
    await harness.settle()
    assert harness.started[3:] == ["g3"]


async def test_a_rollout_without_groups_says_that_it_waits_for_them_also_when_the_last_ends_during_a_poll(harness):
    harness.hold(0)
    await harness.serving(lease(0))
    before = len(harness.waits)
    harness.holds["g0"].set()
    await harness.settle()
    room, *idle = harness.waits[before:]
    assert room == ("room for its record", "trajectories") and set(idle) == {("prompts", "ledger")}


async def test_an_idle_rollout_asks_anew_for_all_that_fits_so_that_groups_start_together(harness):
    harness.limit = 4
    harness.hold(0, 1)
    await harness.serving(lease(0), lease(1))
    harness.holds["g0"].set()
    await harness.settle()
    assert harness.runner.polls[-1] == (1, 1)
    harness.holds["g1"].set()
    await harness.settle()
    assert harness.runner.polls[-1] == (2, 1)
    await harness.runner.put(lease(2), lease(3))
    await harness.settle()
    assert harness.started[2:] == ["g2", "g3"] and harness.runner.given_back == []


async def test_groups_that_end_together_are_asked_for_by_one_question(harness, monkeypatch):
    monkeypatch.setattr(rollout_loop, "GATHER_S", 0.3)
    harness.limit = 6
    harness.hold(0, 1, 2)
    await harness.serving(lease(0), lease(1), lease(2))
    harness.holds["g0"].set()
    await harness.until(lambda: harness.loop.groups_in_flight == 2)
    for name in ("g1", "g2"):
        harness.holds[name].set()
    await harness.until(lambda: len(harness.runner.polls) == 2)
    assert harness.runner.polls == [(3, 1), (3, 1)]


async def test_leases_of_answers_that_crossed_all_begin_for_the_engine_queues_what_it_has_no_rows_for(harness):
    harness.limit = 8
    await harness.serving()
    harness.limit = 2
    await harness.runner.put(*[lease(i) for i in range(3)])
    await harness.settle()
    assert harness.started == ["g0", "g1", "g2"] and harness.runner.given_back == []


async def test_a_poll_is_not_cancelled_by_the_gate_and_what_it_brings_late_is_given_back(harness):
    await harness.serving()
    harness.loop.close()
    await harness.runner.put(lease(0))
    await harness.settle()
    assert harness.started == [] and harness.runner.given_back == [("t0", "stale", LATE)]


async def test_a_question_outlives_a_sync_and_brings_the_groups_of_the_new_version(harness):
    await harness.serving()
    harness.loop.close()
    harness.version = 2
    harness.loop.open()
    await harness.runner.put(lease(0, version=2))
    await harness.settle()
    assert harness.runner.polls[0] == (50, 1) and harness.started == ["g0"] and harness.runner.given_back == []


async def test_a_lease_for_other_weights_than_those_served_is_given_back(harness):
    await harness.serving(lease(0, version=2))
    assert harness.started == [] and harness.runner.given_back == [("t0", "stale", LATE)]


async def test_an_empty_answer_is_asked_again_at_once(harness):
    await harness.serving()
    for count in (2, 3, 4):
        harness.now += POLL_SECONDS
        await harness.runner.end_poll()
        await harness.until(lambda count=count: len(harness.runner.polls) == count)


async def test_a_runner_that_refuses_at_once_is_not_asked_again_and_again_but_soon_enough(harness):
    harness.runner.refuses = True
    await harness.serving()
    await harness.settle()
    assert 1 <= len(harness.runner.polls) <= 10
    await harness.runner.set(refuses=False)
    await harness.runner.put(lease(0))
    assert (await harness.record(0)).group_id == "g0"


async def test_a_runner_out_of_reach_is_asked_until_it_is_back_and_reported_once(harness, caplog):
    harness.runner.failure = WorkerLost("the runner is gone")
    with caplog.at_level(logging.WARNING):
        harness.start()
        await harness.until(lambda: len(harness.runner.polls) >= 3)
    assert caplog.text.count("the runner is gone") == 1
    await harness.runner.set(failure=None)
    await harness.runner.put(lease(0))
    assert (await harness.record(0)).group_id == "g0"


@pytest.mark.parametrize("mode", ["train", "validate"])
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
async def test_a_failed_group_is_given_back_by_its_kind(harness, error, reason, mode):
    harness.failure = error
    await harness.serving(lease(0, mode=mode))
    assert harness.runner.given_back == [("t0", reason, f"{type(error).__name__}: {error}")]
    assert await harness.depth(harness.trajectories) == await harness.depth(harness.validation) == 0
    assert harness.loop.groups_in_flight == 0


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (RolloutDataFailure("cannot parse"), True),
        (GymTransportError("cannot parse"), True),
        (WorkerLost("gone"), False),
    ],
)
async def test_the_sample_that_failed_a_group_goes_to_the_runner_unless_a_process_was_lost(harness, error, kept):
    attach_sample(error, 1, [{"role": "user", "content": "123", "token_ids": torch.tensor([1, 2])}])
    harness.failure = error
    given = lease(0)
    given.sample.update(message_log=[], extra_env_info={"answer": "6"})
    await harness.serving(given)
    (sample,) = harness.runner.failed_samples
    assert (sample is not None) == kept
    if kept:
        assert sample.messages == (("user", "123", 2),) and sample.error == f"{type(error).__name__}: cannot parse"
        assert (sample.group_id, sample.index, sample.info, sample.reason) == ("g0", 1, {"answer": "6"}, "error")
        assert math.isnan(sample.reward) and sample.versions == (1, 1)


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (ValueError("header of 65 bytes"), "data", "the record cannot be sent: header of 65 bytes"),
        (ConfigError("no channel t"), "infrastructure", "the record could not be delivered: no channel t"),
        (OSError("no room"), "infrastructure", "the record could not be delivered: no room"),
    ],
    ids=["no message can hold it", "the channel is gone", "the machine fails"],
)
async def test_a_record_that_does_not_arrive_is_given_back_with_whose_fault_it_is(
    harness, monkeypatch, error, reason, message
):
    async def put(record, key):
        raise error

    monkeypatch.setattr(harness.trajectories, "put_async", put)
    await harness.serving(lease(0))
    assert harness.runner.given_back == [("t0", reason, message)] and harness.loop.groups_done == 0


async def test_validation_is_answered_with_scores(harness):
    await harness.serving(lease(0, mode="validate"))
    assert await harness.validation.get_async(timeout=60) == ValidationScores(
        group_id="g0", token="t0", rewards=(0.5, None), lengths=(3, 3), truncated=(False, False)
    )
    assert await harness.depth(harness.trajectories) == 0


async def test_held_leases_are_renewed_until_their_groups_end(harness):
    harness.hold(0, 1)
    await harness.serving(lease(0, seconds=0.01), lease(1, seconds=0.01))
    await harness.until(lambda: ["t0", "t1"] in harness.runner.renewed)
    harness.holds["g0"].set()
    await harness.until(lambda: harness.runner.renewed[-1] == ["t1"])
    harness.holds["g1"].set()
    await harness.settle()
    count = len(harness.runner.renewed)
    await harness.settle()
    assert len(harness.runner.renewed) == count


async def test_a_group_whose_lease_is_no_longer_current_is_dropped_without_an_answer(harness):
    harness.hold(0, 1)
    harness.runner.stale = {"t0"}
    await harness.serving(lease(0, seconds=0.01), lease(1, seconds=0.01))
    await harness.until(lambda: harness.loop.groups_in_flight == 1)
    harness.holds["g1"].set()
    assert (await harness.record(1)).group_id == "g1"
    await harness.settle()
    assert harness.runner.given_back == [] and await harness.depth(harness.trajectories) == 0


async def test_renewals_go_on_after_the_runner_was_out_of_reach(harness, caplog):
    harness.hold(0)
    await harness.serving(lease(0, seconds=0.01))
    with caplog.at_level(logging.WARNING):
        await harness.runner.set(failure=WorkerLost("the runner is gone"))
        count = len(harness.runner.renewed)
        await harness.until(lambda: len(harness.runner.renewed) >= count + 3)
        await harness.runner.set(failure=None)
        count = len(harness.runner.renewed)
        await harness.until(lambda: len(harness.runner.renewed) >= count + 2)
    assert caplog.text.count("leases cannot be renewed") == 1 and harness.loop.groups_in_flight == 1


async def test_pausing_lets_groups_end(harness):
    harness.hold(0)
    await harness.serving(lease(0))
    pausing = asyncio.ensure_future(harness.loop.pause(60))
    await harness.settle()
    assert not pausing.done()
    harness.holds["g0"].set()
    await pausing
    assert await harness.depth(harness.trajectories) == 1 and harness.loop.groups_in_flight == 0
    assert harness.runner.given_back == []


@pytest.mark.parametrize("how", ["pause", "stop"])
async def test_groups_that_cannot_end_are_given_back_as_stale(harness, how):
    harness.hold(0)
    await harness.serving(lease(0))
    await (harness.loop.pause(0.01) if how == "pause" else harness.loop.stop())
    assert harness.runner.given_back == [("t0", "stale", STOPPED)]
    assert await harness.depth(harness.trajectories) == 0 and harness.loop.groups_in_flight == 0


async def test_a_group_that_was_leased_in_the_moment_of_a_stop_is_given_back_too(harness):
    harness.start()
    await harness.until(lambda: harness.runner.polls)
    stopped = asyncio.ensure_future(harness.until(lambda: harness.loop.groups_in_flight))
    await harness.runner.put(lease(0))
    harness.hold(0)
    await stopped
    await harness.loop.stop()
    assert harness.runner.given_back == [("t0", "stale", STOPPED)]


async def test_a_stop_ends_though_nothing_can_be_given_back(harness):
    harness.hold(0)
    await harness.serving(lease(0))
    harness.runner.failure = WorkerLost("the runner is gone")
    await harness.loop.stop()
    assert harness.loop.groups_in_flight == 0


async def test_starting_twice_keeps_one_loop_and_a_stopped_server_starts_again(harness):
    harness.start()
    await harness.serving(lease(0))
    await harness.record(0)
    await harness.loop.stop()
    await harness.runner.end_poll()  # the poll of before the stop
    await harness.settle()
    await harness.serving(lease(1))
    assert (await harness.record(1)).group_id == "g1"
    assert harness.started == ["g0", "g1"] and harness.runner.given_back == []


async def test_a_group_that_the_runner_cancelled_ends_at_once_without_an_answer_and_its_rows_are_free(harness):
    harness.limit = 4
    harness.hold(0, 1)
    await harness.serving(lease(0), lease(1))
    harness.loop.drop(["t0", "of a group that has ended"])
    await harness.runner.put(lease(2))
    assert (await harness.record(2)).group_id == "g2"
    await harness.settle()
    assert harness.runner.given_back == [] and harness.loop.groups_in_flight == 1
