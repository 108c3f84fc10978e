"""One environment step per task, in order, with rewards checked."""

import asyncio

import pytest
import torch

from rl_core.api.errors import RolloutConfigError, RolloutDataFailure
from rl_core.api.records import EnvironmentReturn
from rl_core.rollouts.multi_turn import calculate_rewards
from rl_core.rollouts.scoring import one_reward


def batch(*rows):
    return {
        "message_log": [[{"role": "assistant", "content": text, "token_ids": torch.zeros(1)}] for _, text in rows],
        "task_name": [task for task, _ in rows],
        "extra_env_info": [{"text": text} for _, text in rows],
    }


class Echo:
    """Reward = number in the text; remembers what it saw."""

    def __init__(self, *, maps=False, drop=0):
        self.calls, self.maps, self.drop = [], maps, drop

    async def step(self, logs, metadata):
        self.calls.append((logs, metadata))
        values = [float(log[-1]["content"]) for log in logs][: len(logs) - self.drop]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"saw {log[-1]['content']}"} for log in logs],
            metadata=metadata,
            next_stop_strings=None,
            rewards={"x": torch.tensor(values)} if self.maps else torch.tensor(values),
            terminateds=torch.ones(len(logs), dtype=torch.bool),
            answers=None,
        )


async def test_one_call_per_task_and_answers_in_the_original_order():
    a, b = Echo(), Echo()
    found = await calculate_rewards(batch(("a", "1"), ("b", "2"), ("a", "3")), {"a": a, "b": b})
    assert (len(a.calls), len(b.calls)) == (1, 1)
    assert found.rewards.tolist() == [1.0, 2.0, 3.0] and found.rewards.dtype == torch.float32
    assert [o["content"] for o in found.observations] == ["saw 1", "saw 2", "saw 3"]
    assert [m["text"] for m in found.metadata] == ["1", "2", "3"]
    assert found.next_stop_strings == [None] * 3 and found.answers == [None] * 3
    assert found.terminateds.tolist() == [True] * 3


async def test_an_environment_sees_role_and_content_only():
    env = Echo()
    await calculate_rewards(batch(("a", "1")), {"a": env})
    assert set(env.calls[0][0][0][0]) == {"role", "content"}


async def test_tasks_run_concurrently_and_all_end_before_a_failure_is_raised():
    started, order = asyncio.Event(), []

    class Waits(Echo):
        async def step(self, logs, metadata):
            started.set()
            await asyncio.sleep(0.01)
            order.append("slow ended")
            return await super().step(logs, metadata)

    class Fails(Echo):
        async def step(self, logs, metadata):
            await started.wait()
            order.append("failed")
            raise RolloutDataFailure("no")

    with pytest.raises(RolloutDataFailure, match="no"):
        await calculate_rewards(batch(("a", "1"), ("b", "2")), {"a": Waits(), "b": Fails()})
    assert order == ["failed", "slow ended"]


async def test_a_blocking_step_does_not_block_the_loop():
    import threading

    release = threading.Event()

    class Blocking(Echo):
        def step(self, logs, metadata):
            assert release.wait(60)
            return EnvironmentReturn(
                [{"role": "environment", "content": ""}], metadata, None, torch.ones(1), torch.ones(1), None
            )

    task = asyncio.ensure_future(calculate_rewards(batch(("a", "1")), {"a": Blocking()}))
    await asyncio.sleep(0)
    release.set()
    assert (await task).rewards.tolist() == [1.0]


async def test_a_blocking_step_that_runs_dry_is_a_failure_and_no_hang():
    class Dry:
        def step(self, logs, metadata):
            return next(iter(()))

    with pytest.raises(RuntimeError, match=r"Dry\.step raised StopIteration"):
        await asyncio.wait_for(calculate_rewards(batch(("a", "1")), {"a": Dry()}), 60)


async def test_an_empty_batch_calls_nothing():
    env = Echo()
    found = await calculate_rewards(batch(), {"a": env})
    assert not env.calls and len(found.rewards) == 0 and found.observations == []


async def test_an_unknown_task_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"\['a', 'b'\], got 'c'"):
        await calculate_rewards(batch(("c", "1")), {"a": Echo(), "b": Echo()})


async def test_numbers_and_maps_do_not_mix_over_tasks():
    with pytest.raises(AssertionError, match="all maps"):
        await calculate_rewards(batch(("a", "1"), ("b", "2")), {"a": Echo(), "b": Echo(maps=True)})


async def test_maps_of_several_tasks_merge_by_name():
    found = await calculate_rewards(batch(("a", "1"), ("b", "2")), {"a": Echo(maps=True), "b": Echo(maps=True)})
    assert found.rewards["x"].tolist() == [1.0, 2.0]


async def test_a_wrong_number_of_rows_is_a_data_failure():
    with pytest.raises(RolloutDataFailure, match="must answer 2 rows, got 1 in rewards"):
        await calculate_rewards(batch(("a", "1"), ("a", "2")), {"a": Echo(drop=1)})


def test_components_are_summed_with_the_weights_of_the_environment():
    class Weighted:
        reward_weights = {"style": 0.5, "answer": 2.0}

    rewards = {"style": torch.tensor([1.0]), "answer": torch.tensor([3.0])}
    assert one_reward(rewards, Weighted(), "") == ({"style": 1.0, "answer": 3.0}, 6.5)
    assert one_reward({"style": [1.0], "answer": [None]}, Weighted(), "") == ({"style": 1.0}, 0.5)
    with pytest.raises(RolloutConfigError, match="answer, style"):
        one_reward(rewards, object(), "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_a_failure_never_a_reward(value):
    with pytest.raises(RolloutDataFailure, match="must be finite"):
        one_reward(torch.tensor([value]), object(), "prompt_idx=1")


def test_a_reward_that_does_not_apply_stays_apart():
    assert one_reward([None], object(), "") == ({}, None)
