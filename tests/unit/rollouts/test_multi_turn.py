"""A prompt group by turns: log, rewards, limits, failures."""

import asyncio
import copy
import math

import numpy as np
import pytest
import torch

from rl_core.api.errors import (
    GenerationUnavailable,
    InfrastructureError,
    RolloutConfigError,
    RolloutDataFailure,
    RolloutTimeout,
    WorkerLost,
)
from rl_core.rollouts.base import sample_seed, token_loss_mask
from rl_core.rollouts.failed_sample import ATTRIBUTE
from rl_core.rollouts.multi_turn import AsyncRolloutImpl


def make(fakes, *, script=("hi",), env=None, n=1, max_seq_len=100, turns=999999, **options):
    generation = fakes.Generation(script)
    impl = AsyncRolloutImpl(
        fakes.Tokenizer(), {"task": env or fakes.Env()}, n, max_seq_len, generation, turns, **options
    )
    return impl, generation


def text(message):
    return "".join(chr(i) for i in message["token_ids"].tolist())


async def test_a_single_turn_sample_has_prompt_answer_and_observation(fakes):
    impl, _ = make(fakes, env=fakes.Env({"reward": 0.5, "terminated": True, "content": ""}))
    record = await impl.run_rollout(fakes.sample())
    (completion,) = record.completions
    assert [m["role"] for m in completion.message_log] == ["user", "assistant", "environment"]
    assert [text(m) for m in completion.message_log] == ["ask", "hi", ""]
    assert completion.message_log[2]["token_ids"].dtype == torch.int64
    assert token_loss_mask(completion.message_log).tolist() == [0, 0, 0, 1, 1]
    assert (completion.reward, completion.finish_reason, completion.truncated) == (0.5, "terminated", False)
    assert completion.policy_versions == (3, 3)
    assert (record.prompt_idx, record.group_id, record.metadata) == (7, "0-7", {"task_name": "task"})
    assert (record.start_version, record.end_version) == (3, 3)


async def test_turns_add_rewards_stops_metadata_and_observation_tokens(fakes):
    env = fakes.Env(
        {"reward": 1.0, "content": "|go", "metadata": {"step": 1}, "stops": ["x"]},
        {"reward": 2.0, "terminated": True, "content": "|end", "metadata": {"step": 2}},
    )
    impl, generation = make(fakes, script=("one", "two"), env=env)
    (completion,) = (await impl.run_rollout(fakes.sample(stop_strings=["first"]))).completions
    assert [text(m) for m in completion.message_log] == ["ask", "one", "|go", "two", "|end"]
    assert completion.reward == 3.0 and completion.env_extras == {"step": 2}
    assert [seen["stop_strings"] for seen in generation.seen] == [["first"], ["x"]]
    assert generation.seen[1]["prompt"] == [ord(c) for c in "askone|go"]


async def test_the_budget_of_turns_ends_a_sample_but_not_one_that_just_terminated(fakes):
    endless = fakes.Env({"terminated": False})
    impl, _ = make(fakes, script=lambda data: "a", env=endless, turns=3)
    record = await impl.run_rollout(fakes.sample())
    assert record.completions[0].finish_reason == "max_turns" and not record.completions[0].truncated
    assert record.rollout_metrics["max_turns_reached_rate"] == 1.0
    impl, _ = make(fakes, env=fakes.Env({"terminated": True}), turns=1)
    record = await impl.run_rollout(fakes.sample())
    assert record.completions[0].finish_reason == "terminated"
    assert record.rollout_metrics["max_turns_reached_rate"] == 0.0


async def test_a_cut_answer_is_still_scored_and_says_length(fakes):
    cut = {"finish_reason": "length"}
    impl, _ = make(fakes, script=(("hi", cut),), env=fakes.Env({"reward": 0.25, "terminated": True}))
    (completion,) = (await impl.run_rollout(fakes.sample())).completions
    assert (completion.reward, completion.finish_reason, completion.truncated) == (0.25, "length", True)


async def test_generation_cut_by_the_sequence_limit_says_seq_limit(fakes):
    cut = {"finish_reason": "seq_limit"}
    impl, _ = make(fakes, script=(("hi", cut),))
    assert (await impl.run_rollout(fakes.sample())).completions[0].finish_reason == "seq_limit"


@pytest.mark.parametrize(
    ("max_seq_len", "kept", "terminated", "reason"),
    [
        pytest.param(9, 3, False, "max_turns", id="one token to spare"),
        pytest.param(8, 3, False, "seq_limit", id="exact fit without an end counts as cut"),
        pytest.param(8, 3, True, "terminated", id="exact fit with an end does not"),
        pytest.param(7, 2, False, "seq_limit", id="cut to what is left"),
        pytest.param(7, 2, True, "terminated", id="cut text but ended episode"),
        pytest.param(5, 0, False, "seq_limit", id="nothing left"),
        pytest.param(4, 0, False, "seq_limit", id="generation already beyond"),
    ],
)
async def test_an_observation_is_cut_to_the_sequence_limit(fakes, max_seq_len, kept, terminated, reason):
    env = fakes.Env({"content": "|ab", "terminated": terminated})
    impl, _ = make(fakes, env=env, max_seq_len=max_seq_len, turns=1)
    (completion,) = (await impl.run_rollout(fakes.sample())).completions
    observation = completion.message_log[-1]
    assert len(observation["token_ids"]) == kept and observation["content"] == "|ab"
    assert completion.finish_reason == reason and completion.truncated == (reason == "seq_limit")


async def test_of_an_observation_of_any_length_no_more_is_tokenised_than_there_is_room_for(fakes, monkeypatch):
    asked, encode = [], fakes.Tokenizer.__call__
    monkeypatch.setattr(
        fakes.Tokenizer, "__call__", lambda self, text, **more: asked.append(len(text)) or encode(self, text, **more)
    )
    env = fakes.Env({"content": "|" + "a" * 1_000_000})
    impl, _ = make(fakes, env=env, max_seq_len=20, turns=1)
    (completion,) = (await impl.run_rollout(fakes.sample())).completions
    assert sum(len(message["token_ids"]) for message in completion.message_log) == 20
    assert max(asked) < 1000


@pytest.mark.parametrize("versions", [[(0, 1, 3)], [(1, 2, 3)], [(0, 1, 3), (0, 2, 4)], [(0, 3, 3)]])
async def test_versions_of_a_backend_that_leave_a_token_out_are_refused(fakes, versions):
    impl, _ = make(fakes, script=[("hi", {"versions": versions})])
    with pytest.raises(RolloutDataFailure, match="policy_versions must cover the 2 generated tokens"):
        await impl.run_rollout(fakes.sample())


async def test_samples_share_nothing_with_each_other_or_the_input(fakes):
    class Vandal(fakes.Env):
        async def step(self, logs, metadata):
            metadata[0]["deep"]["n"] += 1
            logs[0][0]["content"] = "changed"
            answer = await super().step(logs, metadata)
            return answer._replace(metadata=metadata)

    sample = fakes.sample()
    before = copy.deepcopy(sample)
    impl, _ = make(fakes, env=Vandal(), n=3)
    record = await impl.run_rollout(sample)
    assert sample["extra_env_info"] == before["extra_env_info"]
    assert sample["message_log"][0]["content"] == "ask"
    assert [c.env_extras["deep"]["n"] for c in record.completions] == [2, 2, 2]
    assert record.prompt is sample["message_log"]
    record.completions[0].message_log[0]["token_ids"][0] = 0
    assert record.completions[1].message_log[0]["token_ids"][0] == ord("a") == sample["message_log"][0]["token_ids"][0]


async def test_completions_are_in_index_order_whatever_finishes_first(fakes):
    sample = fakes.sample()
    seeds = [sample_seed(5, "0-7", i) for i in range(4)]

    class Reversed(fakes.Generation):
        async def generate_row(self, prompt, *, seed, **request):
            for _ in range(4 - seeds.index(seed)):
                await asyncio.sleep(0)
            return await super().generate_row(prompt, seed=seed, **request)

    impl = AsyncRolloutImpl(fakes.Tokenizer(), {"task": fakes.Env()}, 4, 100, Reversed(), seed=5)
    record = await impl.run_rollout(sample)
    assert [completion.seed for completion in record.completions] == seeds


async def test_seeds_differ_per_sample_and_repeat_until_the_attempt_rises(fakes):
    impl, generation = make(fakes, n=3, seed=1)
    for attempt in (1, 1, 2):
        await impl.run_rollout(fakes.sample(attempt=attempt))
    seeds = [seen["seed"] for seen in generation.seen]
    assert len(set(seeds[:3])) == 3 and seeds[:3] == seeds[3:6] and not set(seeds[:3]) & set(seeds[6:])


async def test_the_first_failure_cancels_the_siblings_and_waits_for_them(fakes):
    generation = fakes.Generation(lambda data: "x")

    class OneFails(fakes.Env):
        async def step(self, logs, metadata):
            if len(self.calls) == 0:
                self.calls.append(1)
                raise WorkerLost("pod gone")
            await asyncio.sleep(3600)

    impl = AsyncRolloutImpl(fakes.Tokenizer(), {"task": OneFails()}, 4, 100, generation)
    with pytest.raises(WorkerLost, match="pod gone"):
        await impl.run_rollout(fakes.sample())
    assert generation.active == 0
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        pytest.param(WorkerLost("down"), GenerationUnavailable, id="infrastructure"),
        pytest.param(ConnectionError("down"), GenerationUnavailable, id="connection"),
        pytest.param(KeyError("odd"), RolloutDataFailure, id="unknown"),
        pytest.param(RolloutDataFailure("bad"), RolloutDataFailure, id="data"),
    ],
)
async def test_a_backend_failure_is_typed_and_names_the_sample(fakes, error, kind):
    def fail(data):
        raise error

    impl, _ = make(fakes, script=fail)
    with pytest.raises(kind, match=r"prompt_idx=7 traj_idx=0") as caught:
        await impl.run_rollout(fakes.sample())
    assert caught.value.__cause__ is error


async def test_log_probabilities_must_be_finite(fakes):
    broken = {"logprobs": [-0.5, float("nan")]}
    impl, _ = make(fakes, script=(("hi", broken),))
    with pytest.raises(RolloutDataFailure, match="must be finite"):
        await impl.run_rollout(fakes.sample())


async def test_a_reward_that_is_not_a_number_is_a_failure(fakes):
    impl, _ = make(fakes, env=fakes.Env({"reward": math.nan, "terminated": True}))
    with pytest.raises(RolloutDataFailure, match=r"reward must be finite, got nan for prompt_idx=7"):
        await impl.run_rollout(fakes.sample())


async def test_a_failure_carries_the_message_log_of_its_sample(fakes):
    impl, _ = make(fakes, n=1, env=fakes.Env({"reward": math.nan, "terminated": True}))
    with pytest.raises(RolloutDataFailure) as caught:
        await impl.run_rollout(fakes.sample())
    index, log = getattr(caught.value, ATTRIBUTE)
    assert index == 0 and [text(message) for message in log] == ["ask", "hi"]


async def test_a_reward_that_does_not_apply_masks_the_sample(fakes):
    impl, _ = make(fakes, env=fakes.Env({"reward": None, "terminated": True}))
    record = await impl.run_rollout(fakes.sample())
    (completion,) = record.completions
    assert math.isnan(completion.reward) and completion.loss_multiplier == 0.0
    assert record.rollout_metrics["total_reward/histogram"] == []


async def test_rewards_by_name_are_kept_and_summed_with_weights(fakes):
    env = fakes.Env(
        {"reward": {"a": 1.0, "b": 2.0}},
        {"reward": {"a": 1.0, "b": 0.0}, "terminated": True},
        reward_weights={"a": 1.0, "b": 0.25},
    )
    impl, _ = make(fakes, script=("one", "two"), env=env)
    record = await impl.run_rollout(fakes.sample())
    (completion,) = record.completions
    assert completion.reward == 2.5
    assert completion.metrics["reward/a"] == 2.0 and completion.metrics["reward/b"] == 2.0
    assert record.rollout_metrics["reward/a/mean"] == record.rollout_metrics["reward/b/mean"] == 2.0


async def test_a_prompt_without_room_is_refused(fakes):
    impl, generation = make(fakes, max_seq_len=3)
    with pytest.raises(RolloutDataFailure, match="shorter than max_seq_len 3, got 3 tokens"):
        await impl.run_rollout(fakes.sample())
    assert not generation.seen


async def test_a_late_environment_is_a_deadline_failure(fakes):
    class Late(fakes.Env):
        async def step(self, logs, metadata):
            await asyncio.sleep(3600)

    impl, _ = make(fakes, env=Late(), env_step_seconds=0.01)
    with pytest.raises(RolloutTimeout, match="environment step of sample 0-7_g0 missed its deadline of 0.01 s"):
        await impl.run_rollout(fakes.sample())


async def test_a_blocking_environment_is_run_in_a_thread(fakes):
    impl, _ = make(fakes, env=fakes.SyncEnv({"reward": 1.0, "terminated": True}), n=2)
    assert [c.reward for c in (await impl.run_rollout(fakes.sample())).completions] == [1.0, 1.0]


async def test_numpy_token_ids_of_the_wire_are_taken(fakes):
    sample = fakes.sample()
    sample["message_log"][0]["token_ids"] = np.array([ord(c) for c in "ask"], dtype=np.int64)
    sample["message_log"][0]["token_ids"].flags.writeable = False
    impl, _ = make(fakes)
    (completion,) = (await impl.run_rollout(sample)).completions
    assert isinstance(completion.message_log[0]["token_ids"], torch.Tensor)


@pytest.mark.parametrize(
    ("turns", "options", "match"),
    [(0, {}, "max_rollout_turns must be >= 1, got 0"), (1, {"colour": 1}, "does not know colour")],
)
def test_bad_settings_are_refused(fakes, turns, options, match):
    with pytest.raises(RolloutConfigError, match=match):
        make(fakes, turns=turns, **options)


async def test_metrics_of_a_group(fakes):
    env = fakes.Env({"content": "|go"}, {"reward": 1.0, "terminated": True, "content": "|!"})
    impl, _ = make(fakes, script=("one", "three"), env=env, n=2)
    found = (await impl.run_rollout(fakes.sample())).rollout_metrics
    expected = {
        "total_reward/mean": 1.0,
        "turns_per_sample/mean": 2.0,
        "turns_per_sample/p95": 2.0,
        "turns_per_sample/p99": 2.0,
        "total_turns": 4,
        "total_tokens_per_sample/mean": 13.0,
        "gen_tokens_per_sample/max": 8.0,
        "env_tokens_per_sample/min": 5.0,
        "mean_gen_tokens_per_sample": 8.0,
        "max_gen_tokens_per_turn/max": 5,
        "max_gen_tokens_per_turn/mean": 5.0,
        "max_gen_tokens_per_turn/p95": 5.0,
        "truncation_rate": 0.0,
        "natural_termination_rate": 1.0,
        "max_turns_reached_rate": 0.0,
        "finish_reason/terminated_rate": 1.0,
        "finish_reason/length_rate": 0.0,
        "per_worker_token_counts": {0: 16},
        "histogram/gen_tokens_length": [3, 5, 3, 5],
        "histogram/input_tokens_length": [3, 9, 3, 9],
        "histogram/total_tokens_length": [6, 14, 6, 14],
    }
    assert {name: found[name] for name in expected} == expected
    for name in ("total", "run_rollouts", "aggregate_metrics"):
        assert found[f"timing/rollout/{name}"] >= 0


async def test_an_error_of_the_environment_keeps_its_type(fakes):
    class Down(fakes.Env):
        async def step(self, logs, metadata):
            raise InfrastructureError("env pod lost")

    impl, _ = make(fakes, env=Down())
    with pytest.raises(InfrastructureError, match="env pod lost"):
        await impl.run_rollout(fakes.sample())


async def test_the_rows_of_a_group_start_together_on_the_first_turn_only(fakes):
    env = fakes.Env({"content": "|go"}, {"terminated": True})
    impl, generation = make(fakes, script=("one", "two"), env=env, n=2)
    await impl.run_rollout(fakes.sample(attempt=3))
    assert [seen["group"] for seen in generation.seen] == [("0-7#3", 2)] * 2 + [None] * 2
