"""Agent programs through the endpoint give the rows of our own multi-turn episodes; their failures fail the sample and are never a reward."""

import asyncio
import sys
import types

import anthropic
import openai
import pytest
import torch

from rl_core.api.errors import ConfigError, RolloutDataFailure, RolloutTimeout
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.batching.collate import collate_groups
from rl_core.batching.samples import keep_sample
from rl_core.envs.agent import AgentEnvironment
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.failed_sample import ATTRIBUTE
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from tests.unit.endpoint.conftest import QUESTION, TURNS, SampledText, rollouts, sample, scripted


class GoOn(EnvironmentInterface):
    """The environment that does what the program `talk` does."""

    def step(self, message_log_batch, metadata_batch):
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        over = [turn == len(TURNS) for turn in turns]
        observations = [{"role": "user", "content": "" if done else "go on"} for done in over]
        rewards = torch.tensor([float(done) for done in over])
        return EnvironmentReturn(observations, [None] * len(turns), None, rewards, torch.tensor(over), None)


async def talk(row, base_url, api_key, model):
    """Say `go on` until the third reply."""
    messages = [{"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in TURNS:
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return {"reward": 1.0, "parts": {"turns": len(TURNS)}, "explanation": "three replies"}


async def talk_by_responses(row, base_url, api_key, model):
    messages = [{"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in TURNS:
            answer = await client.responses.create(model=model, input=messages)
            messages += [*answer.output, {"role": "user", "content": "go on"}]
    return 1.0


async def talk_by_messages(row, base_url, api_key, model):
    messages = [{"role": "user", "content": row["prompt"]}]
    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    async with client:
        for _ in TURNS:
            answer = await client.messages.create(model=model, messages=messages, max_tokens=64)
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": "go on"},
            ]
    return 1.0


async def talk_on(row, base_url, api_key, model):
    """Five turns."""
    messages = [{"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(5):
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return 1.0


async def talk_in_branches(row, base_url, api_key, model):
    """Two turns; then, from the first turn on, another second turn; then a conversation of its own."""
    first = [{"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=first)
        for words in ("go on", "another way"):
            messages = [*first, answer.choices[0].message, {"role": "user", "content": words}]
            await client.chat.completions.create(model=model, messages=messages)
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "summary"}])
    return {"reward": 3.0, "parts": {"turns": 6}}


async def talk_with_instructions(row, base_url, api_key, model):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model=model, messages=messages)
    return 1.0


def talk_in_thread(row, base_url, api_key, model):
    messages = [{"role": "user", "content": row["prompt"]}]
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in TURNS:
            answer = client.chat.completions.create(model=model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return 1.0


def silent(row, base_url, api_key, model):
    return 1.0


def other_names(row, url, key):
    return 1.0


def raises(row, base_url, api_key, model):
    raise KeyError("nothing")


async def hangs(row, base_url, api_key, model):
    import asyncio

    await asyncio.Event().wait()


async def no_number(row, base_url, api_key, model):
    await talk(row, base_url, api_key, model)
    return float("nan")


async def not_applicable(row, base_url, api_key, model):
    await talk(row, base_url, api_key, model)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    module = types.ModuleType("agent_programs")
    programs = [
        talk,
        talk_by_responses,
        talk_by_messages,
        talk_on,
        talk_in_branches,
        talk_in_thread,
        talk_with_instructions,
    ]
    for program in (*programs, silent, other_names, raises, hangs, no_number, not_applicable):
        setattr(module, program.__name__, program)
    monkeypatch.setitem(sys.modules, "agent_programs", module)


def own_episodes(tokenizer):
    """What runs the same conversations without a program: turns of policy and environment."""
    policy, template = SampledText(tokenizer, scripted), ChatTemplate(tokenizer, {1, 3})
    return AsyncRolloutImpl(tokenizer, {"agent": GoOn()}, 2, 2048, policy, seed=1, chat_template=template)


def agent(program):
    return AgentEnvironment({"agent": f"agent_programs:{program}"})


@pytest.mark.parametrize("program", ["talk", "talk_in_thread", "talk_by_responses", "talk_by_messages"])
async def test_an_agent_gives_the_rows_of_our_own_episodes(chatml, program):
    expected = await own_episodes(chatml).run_rollout(sample(chatml))
    async with rollouts(chatml, agent(program)) as agents:
        record = await agents.run_rollout(sample(chatml))
    ours, theirs = (collate_groups([group], pad_token_id=0, max_length=2048) for group in (expected, record))
    for field in (
        "input_ids",
        "attention_mask",
        "loss_mask",
        "raw_rewards",
        "lengths",
        "prompt_lengths",
        "valid",
        "truncated",
    ):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert ours.loss_mask.sum() == 2 * len("onetwothree+++")
    assert [completion.seed for completion in record.completions] == [
        completion.seed for completion in expected.completions
    ]
    assert [completion.finish_reason for completion in record.completions] == ["terminated"] * 2
    assert record.rollout_metrics["turns_per_sample/mean"] == 3
    assert (record.rollout_metrics["branches"], record.rollout_metrics["unspliced"]) == (0, 0)


async def test_log_probabilities_and_versions_are_those_of_the_calls(chatml):
    async with rollouts(chatml, agent("talk"), generations=1) as agents:
        [completion] = (await agents.run_rollout(sample(chatml))).completions
        sampled = [message for message in completion.message_log if message["role"] == "assistant"]
        for message, (_, ids, logprobs, versions) in zip(sampled, agents.policy_generation.calls, strict=True):
            assert message["token_ids"].tolist() == ids
            assert torch.equal(message["generation_logprobs"], torch.tensor(logprobs, dtype=torch.float32))
            assert message["policy_versions"] == versions
        assert completion.metrics["reward/turns"] == 3


async def test_kept_samples_show_what_the_program_sent(chatml):
    async with rollouts(chatml, agent("talk"), generations=1) as agents:
        record = await agents.run_rollout(sample(chatml))
    kept = keep_sample(record, 0, group_id="0-7")
    assert [(role, content) for role, content, _ in kept.messages] == [
        ("user", "hi"),
        ("assistant", "one"),
        ("user", "go on"),
        ("assistant", "two"),
        ("user", "go on"),
        ("assistant", "three"),
    ]
    assert kept.explanation == "three replies"
    assert kept.prompt_messages == 1 and [message["content"] for message in record.prompt] == ["hi"]


async def test_a_failed_run_carries_what_was_said_until_then(chatml):
    async with rollouts(chatml, agent("no_number"), generations=1) as agents:
        with pytest.raises(RolloutDataFailure) as caught:
            await agents.run_rollout(sample(chatml))
    index, log = getattr(caught.value, ATTRIBUTE)
    assert index == 0 and [message["content"] for message in log] == ["hi", "one", "go on", "two", "go on", "three"]


async def test_several_messages_of_a_call_are_shown_under_their_roles(chatml):
    async with rollouts(chatml, agent("talk_with_instructions"), generations=1) as agents:
        record = await agents.run_rollout(sample(chatml))
    assert keep_sample(record, 0, group_id="0-7").messages[0][1] == "system: be short\n\nuser: hi"


@pytest.mark.parametrize(("branches", "rewards"), [("whole", [3.0] * 3), ("equal", [1.0] * 3), ("last", [3.0])])
async def test_branches_are_samples_of_one_episode_and_each_token_trains_once(chatml, branches, rewards):
    async with rollouts(chatml, agent("talk_in_branches"), generations=2, branches=branches) as agents:
        record = await agents.run_rollout(sample(chatml))
        calls = agents.policy_generation.calls
    assert [completion.reward for completion in record.completions] == rewards * 2
    assert {completion.metrics["reward_share"] for completion in record.completions} == {rewards[0] / 3}
    assert {completion.metrics["reward/turns"] for completion in record.completions} == {6 * rewards[0] / 3}
    assert record.rollout_metrics["reward/turns/mean"] == 6 * rewards[0] / 3
    assert (record.rollout_metrics["branches"], record.rollout_metrics["unspliced"]) == (4, 0)
    batch = collate_groups([record], pad_token_id=0, max_length=2048)
    assert len(batch) == 2 * len(rewards) and bool(batch.sample_mask.all()) and len(batch.group_texts) == 1
    trained = sorted(batch.input_ids[row][batch.loss_mask[row]].tolist() for row in range(len(batch)))
    by_call = [call[1] for call in calls]
    summaries = [ids for prompt, ids, *_ in calls if chatml.decode(prompt).count("summary")]
    if branches == "last":
        assert trained == sorted(summaries)
    else:
        assert sum(map(len, trained)) == sum(map(len, by_call))
        starts = [ids for prompt, ids, *_ in calls if chatml.decode(prompt) == QUESTION]
        others = [ids for prompt, ids, *_ in calls if "go on" in chatml.decode(prompt)]
        assert len(starts) == len(others) == 2
        # The first turn trains with the branch that ended later, and is only read in the other one.
        assert all(ids in trained for ids in others)


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("silent", RolloutDataFailure, "must call the model"),
        ("raises", RolloutDataFailure, "KeyError: 'nothing'"),
        ("no_number", RolloutDataFailure, "finite number"),
        ("hangs", RolloutTimeout, "envStep"),
    ],
)
async def test_a_program_without_a_reward_fails_its_sample(chatml, program, error, words):
    seconds = 5.0 if program == "hangs" else 20.0
    async with rollouts(chatml, agent(program), seconds=seconds) as agents:
        with pytest.raises(error, match=words):
            await agents.run_rollout(sample(chatml))


async def test_none_masks_the_sample(chatml):
    async with rollouts(chatml, agent("not_applicable")) as agents:
        record = await agents.run_rollout(sample(chatml))
    assert [completion.loss_multiplier for completion in record.completions] == [0.0, 0.0]


def test_a_function_that_does_not_take_the_endpoint_by_name_is_refused():
    with pytest.raises(ConfigError, match="must take the arguments row, base_url, api_key, model.*'url'"):
        agent("other_names")


def test_a_program_is_not_tried_at_validation_because_there_is_no_model():
    from rl_core.api.data import DataSpec
    from rl_core.data.examples import example_rows

    rows, data = {0: {"prompt": "hi", "answer": "1"}}, DataSpec(train="t.jsonl")
    assert example_rows(rows, data, field="data.train", task_name="agent") == {}
    assert list(example_rows(rows, data, field="data.train", task_name="math")) == ["data.train row 1"]


async def test_a_group_whose_rollout_is_lost_after_three_turns_has_the_same_turns_on_another(chatml):
    def by_seed(prompt, seed):
        return f"{seed % 10**6} after {len(prompt)}"

    async def run(stops_at=None):
        """Return the ids of the sampled turns, of a whole group or of one whose rollout is lost in call `stops_at`."""
        async with rollouts(chatml, agent("talk_on"), generations=1) as agents:
            policy, lost = agents.policy_generation, asyncio.Event()
            policy.texts = by_seed
            generate = policy.generate_row

            async def until_lost(*arguments, **request):
                if len(policy.calls) == stops_at:
                    lost.set()
                    await asyncio.Event().wait()
                return await generate(*arguments, **request)

            agents._generator = types.SimpleNamespace(
                generate_row=until_lost, honours_seeds=True, policy_version=policy.policy_version
            )
            group = asyncio.create_task(agents.run_rollout(sample(chatml)))
            if stops_at is None:
                [completion] = (await group).completions
                return [m["token_ids"].tolist() for m in completion.message_log if m["role"] == "assistant"]
            await lost.wait()
            group.cancel()
            await asyncio.wait([group])
            return [ids for _, ids, *_ in policy.calls]

    before, turns = await run(stops_at=3), await run()
    assert (len(before), len(turns)) == (3, 5) and turns[:3] == before and len(set(map(tuple, turns))) == 5
